//! Extended state that CPUID hides: can the guest access it, and whose contents does it have?
//!
//! A processor refuses the XSETBV, because the hypervisor intercepts it. QEMU's does not implement that intercept. The
//! state must then contain only what this VM has loaded, or zeros. Run VMs with different seeds beside each other.

use crate::arch::{bounds, control, controller, interrupts, tsc};
use crate::experiments::{Context, Outcome};
use crate::interrupt::TIMER;
use crate::record::record;

pub(super) fn run(context: &Context) -> Outcome {
    if !control::has_xsave() {
        return Outcome::Unsupported("no XSAVE");
    }
    if bounds::allow().is_err() {
        record!("record", experiment = "hidden-state", about = "refused");
        return Outcome::Done { failures: 0 };
    }

    let seed = context.settings.seed.unwrap_or(1);
    let mut random = context.random(0);
    let end = tsc::now() + tsc::seconds(context.settings.seconds.unwrap_or(3));
    let (mut looks, mut failures) = (0_u64, 0_u64);
    let mut own = [0; bounds::WORDS];
    interrupts::enable();
    while tsc::now() < end {
        let held = bounds::held();
        looks += 1;
        for (word, (seen, expected)) in held.iter().zip(own).enumerate() {
            if *seen != expected && failures < 5 {
                let (expected, seen) = (format_args!("{expected:#x}"), format_args!("{seen:#x}"));
                record!("violation", experiment = "hidden-state", word = word, expected = expected, seen = seen);
            }
        }
        failures += u64::from(held != own);

        if random.below(2) == 0 {
            own = core::array::from_fn(|_| seed << 56 | random.bits() >> 8);
            bounds::load(&own);
        }
        if random.below(4) == 0 {
            control::leave();
        } else {
            interrupts::disable();
            controller::arm_once(TIMER, tsc::ticks(20 + random.below(400)));
            interrupts::sleep();
            controller::disarm();
            interrupts::enable();
        }
    }
    interrupts::disable();
    controller::disarm();
    record!("record", experiment = "hidden-state", about = "reached", looks = looks, foreign = failures);
    Outcome::Done { failures }
}
