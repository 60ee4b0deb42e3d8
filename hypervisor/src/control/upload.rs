//! Creates a VM by command: collects its files as they arrive, then creates the VM in steps.
//!
//! One upload at a time. The files are in frames of their own, which are freed when the VM is complete or the upload is
//! aborted. A sender may vanish, so an upload without progress expires.

use alloc::string::String;

use abi::control::{Answer, Part, Refusal, VmEvent, WHY_LIMIT};
use abi::payload::{File, VmConfig};
use addr::PAGE_BYTES;
use log::{info, warn};

use super::Control;
use super::port::{Asker, Peer};
use crate::arch::{Arch, Machine};
use crate::cpu::preemption::preemption_point;
use crate::frames::{self, Filled, Frames};
use crate::vm::creation::{Creation, NotCreated};
use crate::vm::spec::Spec;
use crate::vm::table::{self, table};

/// Seconds without a command after which an upload expires. Then another upload may replace it.
const PATIENCE_SECONDS: u64 = 120;
const GRACE_SECONDS: u64 = 10;

/// A VM that is being created.
pub(super) struct Upload {
    number: u32,
    /// Who sends it.
    sender: Peer,
    config: VmConfig,
    kernel: Filled,
    initrd: Option<Filled>,
    /// When something came last, in host ticks.
    heard_at: u64,
    /// All files have arrived: the unfinished VM, and the request that waits for it.
    making: Option<(Creation, Asker)>,
}

impl Upload {
    fn is_idle_for(&self, seconds: u64) -> bool {
        Machine::now().saturating_sub(self.heard_at) > seconds * Machine::hz()
    }
}

/// Length of a file that the tool sends. Boot modules are for VMs of the boot payload only.
fn sent_bytes(file: &File) -> Result<u64, Refusal> {
    file.blob().map(|blob| blob.bytes).ok_or(Refusal::Invalid)
}

impl Control {
    /// Begins to create a VM. Its number serves to name the upload, too.
    pub(super) fn begin_upload(&mut self, sender: Peer, config: VmConfig) -> Result<Answer, Refusal> {
        if self.upload.as_ref().is_some_and(|other| other.making.is_some() || !other.is_idle_for(GRACE_SECONDS)) {
            return Err(Refusal::Busy);
        }
        self.upload = None;
        table().admit(&config.name)?;
        Spec::check(&config).map_err(|_| Refusal::Invalid)?;
        let room = |bytes: u64| {
            if frames::is_low() {
                return Err(Refusal::OutOfMemory);
            }
            let run = Frames::allocate(bytes, PAGE_BYTES).map_err(|_| Refusal::OutOfMemory)?;
            Ok(Filled::new(run))
        };
        let kernel = room(sent_bytes(&config.kernel)?)?;
        let initrd = config.initrd.as_ref().map(|initrd| room(sent_bytes(initrd)?)).transpose()?;
        let number = table::new_number();
        self.upload = Some(Upload { number, sender, config, kernel, initrd, heard_at: Machine::now(), making: None });
        Ok(Answer::Upload(number))
    }

    /// Takes the next bytes of a file.
    pub(super) fn upload_data(
        &mut self,
        number: u32,
        part: Part,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Answer, Refusal> {
        let upload = self.upload_of(number)?;
        upload.heard_at = Machine::now();
        let (file, whole) = match (part, &mut upload.initrd, &upload.config.initrd) {
            (Part::Kernel, ..) => (&mut upload.kernel, sent_bytes(&upload.config.kernel)?),
            (Part::Initrd, Some(file), Some(initrd)) => (file, sent_bytes(initrd)?),
            (Part::Initrd, ..) => return Err(Refusal::NoSuchUpload),
        };
        let follows = offset == file.bytes().len() as u64 && bytes.len() as u64 <= whole - offset;
        if follows && file.push(bytes) { Ok(Answer::Done) } else { Err(Refusal::NoSuchUpload) }
    }

    /// All files have arrived: starts the creation of the VM. The answer to `asker` follows at its end.
    pub(super) fn finish_upload(&mut self, number: u32, asker: Asker) -> Result<(), Refusal> {
        let upload = self.upload_of(number)?;
        let is_whole = |file: &Filled, wanted: &File| sent_bytes(wanted) == Ok(file.bytes().len() as u64);
        let initrd_is_whole = match (&upload.initrd, &upload.config.initrd) {
            (Some(file), Some(wanted)) => is_whole(file, wanted),
            _ => true,
        };
        if !is_whole(&upload.kernel, &upload.config.kernel) || !initrd_is_whole {
            return Err(Refusal::NoSuchUpload);
        }
        match Creation::begin(number, upload.config.clone()) {
            Ok(creation) => upload.making = Some((creation, asker)),
            Err(why) => self.not_created(asker, why),
        }
        Ok(())
    }

    /// Its sender is gone: an upload that cannot go on is discarded. A VM whose files have all arrived is created.
    pub(super) fn sender_left(&mut self, sender: Peer) {
        let _ = self.upload.take_if(|upload| upload.sender == sender && upload.making.is_none());
    }

    /// Discards the upload.
    pub(super) fn abort_upload(&mut self, number: u32) -> Result<Answer, Refusal> {
        self.upload_of(number)?;
        self.upload = None;
        Ok(Answer::Done)
    }

    /// Continues the creation of a VM until about `until`. Returns whether there is more to do.
    pub(super) fn create(&mut self, until: u64) -> bool {
        let Some(upload) = &mut self.upload else { return false };
        let Some((creation, asker)) = &mut upload.making else {
            if upload.is_idle_for(PATIENCE_SECONDS) {
                warn!("{}: no data for {PATIENCE_SECONDS} s; the VM is not created", upload.config.name);
                self.upload = None;
            }
            return false;
        };
        let asker = *asker;
        let initrd = upload.initrd.as_ref().map(Filled::bytes);
        let spec = Spec { config: &upload.config, kernel: upload.kernel.bytes(), initrd };
        let made = loop {
            match creation.step(spec) {
                Ok(None) if Machine::now() > until => return true,
                Ok(None) => preemption_point(),
                Ok(Some(vm)) => break Ok(vm),
                Err(why) => break Err(why),
            }
        };
        match made {
            Ok(vm) => {
                let (number, name) = (vm.number, String::from(vm.name()));
                self.upload = None;
                table().add(vm);
                self.consoles.added(number, &name);
                self.tell(number, VmEvent::Created { name });
                self.reply(asker, Ok(Answer::Created { vm: number }));
            }
            Err(why) => self.not_created(asker, why),
        }
        true
    }

    /// The creation failed: frees what was taken, then reports why.
    fn not_created(&mut self, asker: Asker, NotCreated { about, why }: NotCreated) {
        if let Some(upload) = self.upload.take() {
            info!("{}: not created: {why}", upload.config.name);
        }
        let why = why.chars().take(WHY_LIMIT / 4).collect();
        self.reply(asker, Ok(Answer::NotCreated { about, why }));
    }

    /// The upload with this number.
    fn upload_of(&mut self, number: u32) -> Result<&mut Upload, Refusal> {
        let upload = self.upload.as_mut().filter(|upload| upload.number == number && upload.making.is_none());
        upload.ok_or(Refusal::NoSuchUpload)
    }
}
