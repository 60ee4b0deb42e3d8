//! The report as a browser shows it: pictures in the width of a phone and of a desktop, in light and dark, looked at
//! pixel by pixel. (What the page says, and that its HTML is good, is tested without a browser.)

use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;
use std::process::Command;

use crate::rig::Rig;

const REAL: &str = include_str!("../results.jsonl");

/// Browsers that make pictures without a screen, by the names that they are known under.
const BROWSERS: [&str; 4] = ["chromium-headless-shell", "chromium", "google-chrome", "chrome"];

/// In pixels: a phone, and a window of a desktop.
const PHONE: u32 = 390;
const DESKTOP: u32 = 1280;
const HEIGHT: u32 = 2400;

/// A picture, three bytes for each pixel.
struct Picture {
    width: usize,
    pixels: Vec<[u8; 3]>,
}

impl Picture {
    fn read(path: &Path) -> Self {
        let decoder = png::Decoder::new(BufReader::new(File::open(path).expect("was made")));
        let mut reader = decoder.read_info().expect("is PNG");
        let mut bytes = vec![0; reader.output_buffer_size().expect("is of a size that memory has")];
        let info = reader.next_frame(&mut bytes).expect("is whole");
        let samples = info.color_type.samples();
        let pixels = bytes[..info.buffer_size()].chunks_exact(samples).map(|it| [it[0], it[1], it[2]]).collect();
        Self { width: usize::try_from(info.width).expect("is small"), pixels }
    }

    /// The colour that most pixels have.
    fn paper(&self) -> [u8; 3] {
        let mut sorted = self.pixels.clone();
        sorted.sort_unstable();
        let runs = sorted.chunk_by(|one, other| one == other);
        runs.max_by_key(|run| run.len()).map_or([0; 3], |run| run[0])
    }

    /// Share of the pixels that are not paper, of the whole, or of these columns.
    fn inked(&self, columns: std::ops::Range<usize>) -> f64 {
        let paper = self.paper();
        let of_columns = self.pixels.iter().enumerate().filter(|(at, _)| columns.contains(&(at % self.width)));
        let (all, inked) =
            of_columns.fold((0_u32, 0_u32), |(all, inked), (_, pixel)| (all + 1, inked + u32::from(*pixel != paper)));
        f64::from(inked) / f64::from(all.max(1))
    }

    /// Whether a pixel has this colour.
    fn has(&self, colour: [u8; 3]) -> bool {
        self.pixels.contains(&colour)
    }
}

fn browser() -> &'static str {
    let is_there =
        |name: &&&str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    BROWSERS.iter().find(is_there).expect("a browser is installed")
}

/// The page in this width and scheme of colours.
fn picture(rig: &Rig, page: &str, width: u32, is_dark: bool) -> Picture {
    let picture = rig.path("picture.png");
    let mut command = Command::new(browser());
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]);
    // A test asks nobody on the network for anything: no updates, no synchronisation, no look-ups in the background.
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]);
    command.arg(format!("--user-data-dir={}", rig.path("profile").display()));
    command.arg(format!("--blink-settings=preferredColorScheme={}", if is_dark { 0 } else { 1 }));
    command.arg(format!("--window-size={width},{HEIGHT}")).arg(format!("--screenshot={}", picture.display()));
    let output = command.arg(format!("file://{}", rig.path(page).display())).output().expect("was there a moment ago");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = Picture::read(&picture);
    fs::remove_file(picture).expect("is ours");
    read
}

fn colour(of: &str, style: &str) -> [u8; 3] {
    let (_, rest) = style.split_once(of).expect("is in the style");
    let hex = rest.trim_start_matches([':', ' ', '#']);
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("is a colour");
    [byte(0), byte(2), byte(4)]
}

#[test]
#[ignore = "needs Chromium; `cargo xtask test browser` installs it and runs this test"]
fn report_can_be_read_on_phone_and_desktop_in_light_and_dark() {
    let rig = Rig::new();
    rig.write("r.jsonl", REAL.as_bytes());
    let output = rig.dunlin(&["report", "r.jsonl", "-o", "page.html"]).output().expect("runs");
    assert!(output.status.success());
    let page = fs::read_to_string(rig.path("page.html")).expect("was written");
    let (light, dark) = page.split_once("prefers-color-scheme: dark").expect("has both");

    for (width, name) in [(PHONE, "phone"), (DESKTOP, "desktop")] {
        for (style, is_dark) in [(light, false), (dark, true)] {
            let shown = picture(&rig, "page.html", width, is_dark);
            let what = format!("{name}, dark: {is_dark}");
            assert_eq!(shown.width, usize::try_from(width).expect("is small"), "{what}");
            assert_eq!(shown.paper(), colour("--paper", style), "{what}");
            // Text and plots: neither an empty page nor a black one.
            let inked = shown.inked(0..shown.width);
            assert!((0.02..0.5).contains(&inked), "{what}: {inked}");
            // The first plot has lines in the first two colours.
            assert!(shown.has(colour("--c0", style)) && shown.has(colour("--c1", style)), "{what}");
            // Nothing sticks out: the margins are empty on both sides.
            let edge = shown.width - 8;
            assert_eq!((shown.inked(0..8), shown.inked(edge..shown.width)), (0.0, 0.0), "{what}");
        }
    }
}
