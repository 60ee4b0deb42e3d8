//! The program of a vCPU of the fake machine: a list of instructions.

/// An instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Writes to a word of memory: its address and the value.
    Write(u64, u64),
    /// Has the hypervisor write to a word, which it has found before if it can.
    WriteByHost(u64, u64),
    /// Has the hypervisor write to a word before the next instruction.
    Owe(u64, u64),
    /// Waits in a loop until a word has this value.
    Await(u64, u64),
    /// As above, so quickly that nearly no time passes.
    Poll(u64, u64),
    /// As above, with PAUSE each time, by which it leaves if the hypervisor wants it to.
    Pause(u64, u64),
    /// Halts until a word has this value. The writer of the word sends an interrupt next.
    Sleep(u64, u64),
    /// A word has this value, or the test fails.
    Expect(u64, u64),
    /// Changes the guest's own page tables: the page leads there from now on. Values only grow.
    Map(u64, u64),
    /// Uses a page by the guest's own page tables, and so brings it into the TLB.
    Touch(u64),
    /// Flushes a page, or everything if none is given, on the vCPUs in the mask.
    Flush(u64, Option<u64>),
    /// Sends an interrupt to a vCPU.
    Interrupt(u32),
    /// Sends an interrupt to all other vCPUs.
    InterruptOthers,
    /// A device interrupts all.
    InterruptByDevice,
    /// Sends an interrupt to a vCPU, which runs next on this pCPU.
    HandOver(u32),
    /// Starts a vCPU that waits for that.
    Start(u32),
    /// Halts until the next interrupt.
    Halt,
    /// Sets the vCPU's timer, which interrupts after this number of ticks.
    Timer(u64),
    /// Computes for this number of ticks.
    Work(u64),
    /// Tells the hypervisor that the guest spins.
    Yield,
    /// Writes a byte to the console.
    Print(u8),
    /// Goes on with another instruction, by its number.
    Jump(usize),
    /// Halts for ever, with interrupts off.
    Stop,
    /// As a parent, creates the first vCPU of its child. The status of the call, plus 1, goes to this address.
    CreateVp(u64),
    /// Turns the VM off.
    ShutDown,
}

/// Where the guest has its page tables: a word for each page.
pub(super) const PAGE_TABLE: u64 = 0x10000;
