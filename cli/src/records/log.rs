//! Writes records, each as one line in one write.

use std::cell::Cell;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::SystemTime;

use serde_json::Value;

use super::{Circumstances, Class, Content, Course, Ground, Machine, Qemu, Record, SCHEMA, Settings};
use crate::failure::Failure;

/// The destination of an experiment's results; none without `--record`.
#[derive(Debug)]
pub(crate) struct Log {
    experiment: &'static str,
    file: Option<(PathBuf, File)>,
    /// Whether something could not be written.
    broken: Cell<bool>,
}

/// A result in the making.
#[derive(Clone, Debug)]
#[must_use = "a figure is not written before `Log::emulated` or `Log::native` has it"]
pub(crate) struct Figure {
    quantity: String,
    unit: &'static str,
    class: Class,
    settings: Settings,
    samples: Vec<f64>,
    observations: Option<u64>,
    others_share: Option<f64>,
}

impl Figure {
    /// `samples` of a quantity.
    pub(crate) fn new(
        quantity: impl Into<String>,
        class: Class,
        unit: &'static str,
        samples: impl Into<Vec<f64>>,
    ) -> Self {
        Self {
            quantity: quantity.into(),
            unit,
            class,
            settings: Settings::new(),
            samples: samples.into().into_iter().map(rounded).collect(),
            observations: None,
            others_share: None,
        }
    }

    /// With this setting.
    pub(crate) fn at(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.settings.insert(name.to_string(), value.into());
        self
    }

    /// Sets the number of observations in each sample.
    pub(crate) fn observations(mut self, count: u64) -> Self {
        self.observations = Some(count);
        self
    }

    /// Others used this share of the computer.
    pub(crate) fn others(mut self, share: Option<f64>) -> Self {
        self.others_share = share;
        self
    }
}

impl Log {
    /// For `experiment`, to the end of `path`.
    pub(crate) fn open(experiment: &'static str, path: Option<&Path>) -> Result<Self, Failure> {
        let file = match path {
            None => None,
            Some(path) => {
                let file = append(path).map_err(|error| Failure::bad_input(format!("{}: {error}", path.display())))?;
                Some((path.to_path_buf(), file))
            }
        };
        Ok(Self { experiment, file, broken: Cell::new(false) })
    }

    /// A log that goes nowhere.
    #[cfg(test)]
    pub(crate) fn nowhere() -> Self {
        Self { experiment: "test", file: None, broken: Cell::new(false) }
    }

    /// A figure measured in a run; `run` is the JSON of the run.
    pub(crate) fn emulated(&self, run: &Value, figure: Figure) {
        self.write(ground(run), qemu(run), figure.content());
    }

    /// How something went over the time of a run.
    pub(crate) fn course(&self, run: &Value, mut course: Course) {
        let Course { samples, middles, moments, counts, .. } = &mut course;
        let numbers = samples.iter_mut().chain(middles).chain(moments.values_mut().flatten());
        for number in numbers.chain(counts.values_mut()) {
            *number = rounded(*number);
        }
        course.from = rounded(course.from);
        self.write(ground(run), qemu(run), Content::Course(course));
    }

    /// A figure measured on this computer itself.
    pub(crate) fn native(&self, figure: Figure) {
        self.write(Ground::Native, None, figure.content());
    }

    /// Something could not be measured.
    pub(crate) fn failure(&self, what: &str, why: &str) {
        let content = Content::Failure { what: what.to_string(), why: why.to_string() };
        self.write(Ground::Emulated, None, content);
    }

    /// Anything else.
    pub(crate) fn write(&self, ground: Ground, qemu: Option<Qemu>, content: Content) {
        let Some((path, file)) = &self.file else { return };
        // A figure that was never measured has no place among those that were.
        let samples = match &content {
            Content::Figure { samples, .. } | Content::Course(Course { samples, .. }) => Some(samples),
            _ => None,
        };
        if samples.is_some_and(Vec::is_empty) {
            return;
        }
        let record = Record {
            schema: SCHEMA,
            experiment: self.experiment.to_string(),
            content,
            circumstances: Circumstances {
                ground,
                machine: this_machine(),
                qemu,
                commit: env!("DUNLIN_COMMIT").to_string(),
                date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            },
        };
        let written = serde_json::to_string(&record).map_err(std::io::Error::other).and_then(|mut line| {
            line.push('\n');
            (&*file).write_all(line.as_bytes())
        });
        if let Err(error) = written
            && !self.broken.replace(true)
        {
            eprintln!("{}: a record could not be written: {error}", path.display());
        }
    }

    /// Whether all records were written.
    pub(crate) fn is_whole(&self) -> bool {
        !self.broken.get()
    }
}

impl Figure {
    fn content(self) -> Content {
        let Self { quantity, unit, class, settings, samples, observations, others_share } = self;
        let unit = unit.to_string();
        Content::Figure { quantity, settings, unit, class, samples, observations, others_share }
    }
}

/// Times and ratios with six digits; counts exactly.
fn rounded(value: f64) -> f64 {
    if value.fract() == 0.0 { value } else { format!("{value:.5e}").parse().unwrap_or(value) }
}

/// Opens to append. A line that was cut off when its writer died is ended, so that ours begins one of its own.
fn append(path: &Path) -> std::io::Result<File> {
    let mut file = File::options().create(true).append(true).read(true).open(path)?;
    if file.seek(SeekFrom::End(0))? > 0 {
        file.seek(SeekFrom::End(-1))?;
        let mut last = [0];
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}

fn ground(run: &Value) -> Ground {
    if run["accel"].as_str() == Some("kvm") { Ground::Virtualized } else { Ground::Emulated }
}

fn qemu(run: &Value) -> Option<Qemu> {
    let text = |name: &str| run[name].as_str().map(str::to_string);
    let (cpu, arch) = (text("cpu_model").unwrap_or_default(), text("arch").unwrap_or_default());
    Some(Qemu { version: text("qemu")?, accel: text("accel")?, cpu, arch })
}

/// The computer that we are on.
fn this_machine() -> Machine {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = available_parallelism().ok().and_then(|cores| u32::try_from(cores.get()).ok()).unwrap_or(1);
    Machine {
        processor: name.map_or("unknown processor", |(_, name)| name).to_string(),
        arch: std::env::consts::ARCH.to_string(),
        cores,
    }
}
