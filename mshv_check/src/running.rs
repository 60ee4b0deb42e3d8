//! VPs that run in threads of their own, until they are told to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::device::Vp;
use crate::message::Message;
use crate::system::Thread;

/// How long a VP may take to leave its guest after a signal. Much more than it takes on a busy emulator.
const PATIENCE: Duration = Duration::from_secs(30);

/// A VP in a thread.
pub(crate) struct Running {
    thread: Thread,
    join: JoinHandle<Result<Vp>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    interrupted: AtomicU64,
    messages: AtomicU64,
}

impl Running {
    /// Runs `vp`, with `handle` for its messages: an error if the guest did what it must not do.
    pub(crate) fn start(vp: Vp, mut handle: impl FnMut(&Vp, &Message) -> Result<()> + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let (mine, (tell, told)) = (shared.clone(), std::sync::mpsc::channel());
        let join = std::thread::spawn(move || {
            // The receiver waits for it.
            let _ = tell.send(Thread::current());
            while !mine.stop.load(Ordering::SeqCst) {
                match vp.run() {
                    Ok(message) => {
                        mine.messages.fetch_add(1, Ordering::SeqCst);
                        handle(&vp, &message).with_context(|| format!("{message:?}"))?;
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                        mine.interrupted.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) => bail!("RUN_VP: {error}"),
                }
            }
            Ok(vp)
        });
        let thread = told.recv().expect("the thread tells it first of all");
        Self { thread, join, shared }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.join.is_finished()
    }

    /// How many runs a signal has ended.
    pub(crate) fn interrupted(&self) -> u64 {
        self.shared.interrupted.load(Ordering::SeqCst)
    }

    pub(crate) fn messages(&self) -> u64 {
        self.shared.messages.load(Ordering::SeqCst)
    }

    pub(crate) fn interrupt(&self) {
        self.thread.interrupt();
    }

    /// Waits until the VP is out of its guest, and returns it.
    pub(crate) fn stop(self) -> Result<Vp> {
        self.shared.stop.store(true, Ordering::SeqCst);
        let started = Instant::now();
        while !self.join.is_finished() {
            if started.elapsed() > PATIENCE {
                bail!("a VP has not left its guest {} s after a signal", PATIENCE.as_secs());
            }
            // A signal that comes just before the device call does not end it.
            self.thread.interrupt();
            std::thread::sleep(Duration::from_millis(2));
        }
        match self.join.join() {
            Ok(result) => result,
            Err(_) => bail!("the thread of a VP has panicked"),
        }
    }
}
