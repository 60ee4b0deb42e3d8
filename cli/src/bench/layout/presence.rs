//! The best place for the word that says whether a vCPU is in its guest: next to its mailbox, or among its owner's
//! data.
//!
//! The owner writes the word at each entry and exit. Senders read it right after a post. Next to the mailbox, a post
//! moves one line from the owner and finds everything there. Apart from it, the owner keeps its line until a sender
//! reads it, but a sender needs two lines. The result depends on the rate of posts. So the benchmark measures several
//! rates, with the hypervisor's own mailbox and presence, on both sides.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use sched::{CpuId, Mailbox, Pending};
use serde_json::{Value, json};
use shootdown::Presence;
use vcpu_layout::{MailboxField, OwnerField, OwnerWord, Proof, lay_out};

use super::structures::{Side, Work};
use crate::bench::cycle::nanos_per_cycle;
use crate::bench::pair::{beside, in_turns, judge_on_free_cores};
use crate::bench::report::Report;
use crate::bench::{Spread, progress};
use crate::records::{Class, Figure};

/// Passes of the posting vCPU per post; `None` for no posts.
const RATES: [Option<u32>; 4] = [None, Some(256), Some(16), Some(1)];

/// As in the hypervisor: everything that others read is in one line.
#[lay_out]
struct Together {
    #[layout(mailbox)]
    reach: Reach,
    #[layout(owner)]
    state: [OwnerWord; 8],
}

#[repr(C, align(64))]
struct Reach {
    mailbox: Mailbox,
    presence: Presence,
}

/// The mailbox line has only the words that others write.
#[lay_out]
struct Apart {
    #[layout(mailbox)]
    mailbox: Posts,
    #[layout(owner)]
    presence: Whereabouts,
    #[layout(owner)]
    state: [OwnerWord; 8],
}

struct Posts(Mailbox);
struct Whereabouts(Presence);

impl MailboxField for Reach {}
impl MailboxField for Posts {}
impl OwnerField for Whereabouts {}

trait Vcpu: Send + Sync + 'static {
    fn new() -> Self;
    fn mailbox(&self) -> &Mailbox;
    fn presence(&self) -> &Presence;
    fn state(&self) -> &[OwnerWord; 8];

    /// From the loop's first step to its last: into the guest, and out for something that is handled at once.
    #[inline(always)]
    fn pass(&self, cpu: u32) {
        self.presence().enter(cpu);
        while self.mailbox().has_work() {
            self.presence().leave();
            black_box(self.mailbox().take());
            self.presence().enter(cpu);
        }
        self.state().iter().for_each(|word| word.add(Proof::by_place(), 1));
        self.presence().leave();
    }

    /// By another vCPU, which then knows whether to kick.
    #[inline(always)]
    fn post(&self) {
        let _ = black_box(self.mailbox().post(Pending::INTERRUPT));
        black_box(self.presence().is_inside());
    }
}

impl Vcpu for Together {
    fn new() -> Self {
        let reach = Reach { mailbox: Mailbox::blocked(), presence: Presence::new() };
        Self::lay_out(TogetherFields { reach, state: Default::default() })
    }

    fn mailbox(&self) -> &Mailbox {
        &self.reach.mailbox
    }

    fn presence(&self) -> &Presence {
        &self.reach.presence
    }

    fn state(&self) -> &[OwnerWord; 8] {
        &self.state
    }
}

impl Vcpu for Apart {
    fn new() -> Self {
        let (mailbox, presence) = (Posts(Mailbox::blocked()), Whereabouts(Presence::new()));
        Self::lay_out(ApartFields { mailbox, presence, state: Default::default() })
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox.0
    }

    fn presence(&self) -> &Presence {
        &self.presence.0
    }

    fn state(&self) -> &[OwnerWord; 8] {
        &self.state
    }
}

/// vCPU 0 only makes passes. vCPU 1 makes passes and posts to vCPU 0 at this rate.
fn work<V: Vcpu>(rate: Option<u32>) -> Work {
    let vcpus = Arc::new(CachePadded::new([V::new(), V::new()]));
    for (cpu, vcpu) in (0..).zip(vcpus.iter()) {
        vcpu.mailbox().run_on(CpuId(cpu));
    }
    // The sides' own memory is on lines of its own, so that it does not count.
    let (both, vcpus) = (CachePadded::new(Arc::clone(&vcpus)), CachePadded::new(vcpus));
    let target: Side = Box::new(move |times| (0..times).for_each(|_| both[0].pass(0)));
    let mut until_post = CachePadded::new(0);
    let poster: Side = Box::new(move |times| {
        for _ in 0..times {
            vcpus[1].pass(1);
            if let Some(rate) = rate {
                if *until_post == 0 {
                    vcpus[0].post();
                    *until_post = rate;
                }
                *until_post -= 1;
            }
        }
    });
    Work([target, poster])
}

/// Passes of a batch: some posts in each, if there are any.
fn operations(rate: Option<u32>) -> u32 {
    rate.map_or(256, |rate| (8 * rate).max(256))
}

/// Cycles of a pass at one rate: of the receiver and of the sender.
#[derive(Clone, Debug, PartialEq)]
struct Compared {
    rate: Option<u32>,
    is_judged: bool,
    together: [Spread; 2],
    apart: [Spread; 2],
    /// How much longer `Apart` takes, on each side.
    ratio: [Spread; 2],
    /// How much longer `Apart` takes on both sides together, turn by turn.
    turns: Vec<f64>,
}

pub(super) fn run(report: &Report<'_>) {
    report.say(
        "\nThe word that says a vCPU is in its guest, beside its mailbox and on a line of its owner: cycles of a pass of\n\
         the vCPU that is posted to, and of the one that posts; median of 25 turns (least-greatest)\n",
    );
    report.say(&format!(
        "{:12}{:16}{:>22}{:>26}{:>24}",
        "posts", "vCPU", "beside the mailbox", "on a line of its owner", "second/first"
    ));
    let mut all = Vec::new();
    for rate in RATES {
        let what = format!("presence, {}", in_words(rate));
        progress(&what);
        let mut works = [work::<Together>(rate), work::<Apart>(rate)];
        let (compared, is_judged) = judge_on_free_cores(&what, || compare(&mut works, rate));
        let Some(compared) = compared else {
            report.say(&format!("{:12}{}", in_words(rate), super::NOT_FREE));
            continue;
        };
        let compared = Compared { is_judged, ..compared };
        report.say(&compared.to_string());
        report.json(compared.json());
        report.native(compared.figure());
        all.push(compared);
    }
    report.say(&conclusion(&all));
}

fn in_words(rate: Option<u32>) -> String {
    rate.map_or("none".to_string(), |rate| format!("1 in {rate}"))
}

fn compare([together, apart]: &mut [Work; 2], rate: Option<u32>) -> Option<Compared> {
    let turns: Vec<[[f64; 2]; 2]> = in_turns(|turn| {
        let cycle = nanos_per_cycle();
        let one = |Work([first, second]): &mut Work| {
            beside(first, second, operations(rate)).map(|nanos| nanos.map(|nanos| nanos / cycle))
        };
        let (together, apart) = if turn % 2 == 0 {
            let together = one(together);
            (together, one(apart))
        } else {
            let apart = one(apart);
            (one(together), apart)
        };
        Some([together?, apart?])
    })?;
    let spread = |value: &dyn Fn(&[[f64; 2]; 2]) -> f64| Spread::of(&turns.iter().map(value).collect::<Vec<_>>());
    let sides = |value: &dyn Fn(&[[f64; 2]; 2], usize) -> f64| {
        Some([spread(&|turn| value(turn, 0))?, spread(&|turn| value(turn, 1))?])
    };
    let sum = |[one, other]: [f64; 2]| one + other;
    Some(Compared {
        rate,
        is_judged: false,
        together: sides(&|[together, _], side| together[side])?,
        apart: sides(&|[_, apart], side| apart[side])?,
        ratio: sides(&|[together, apart], side| apart[side] / together[side])?,
        turns: turns.iter().map(|&[together, apart]| sum(apart) / sum(together)).collect(),
    })
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.is_judged { "" } else { "  cores were not free" };
        for (side, name) in ["is posted to", "posts"].into_iter().enumerate() {
            let rate = if side == 0 { in_words(self.rate) } else { String::new() };
            let [together, apart, ratio] = [&self.together, &self.apart, &self.ratio].map(|it| it[side].to_string());
            let end = if side == 0 { "\n" } else { "" };
            write!(f, "{rate:12}{name:16}{together:>22}{apart:>26}{ratio:>24}{mark}{end}")?;
        }
        Ok(())
    }
}

impl Compared {
    fn figure(&self) -> Figure {
        let quantity = "presence on a line of its owner, to beside the mailbox";
        let figure = Figure::new(quantity, Class::Ratio, "ratio", self.turns.as_slice());
        figure.at("posts", in_words(self.rate)).at("judged", self.is_judged)
    }

    fn json(&self) -> Value {
        let of = |sides: &[Spread; 2]| json!({ "posted_to": sides[0].json(), "posts": sides[1].json() });
        json!({ "part": "presence", "emulated": false, "passes_per_post": self.rate, "judged": self.is_judged,
            "beside_mailbox_cycles": of(&self.together), "owner_line_cycles": of(&self.apart),
            "owner_line_to_beside_mailbox": of(&self.ratio) })
    }

    /// By how many per cent both sides together take longer with the word on a line of its owner.
    fn percent(&self) -> f64 {
        let sum = |sides: &[Spread; 2]| sides[0].median + sides[1].median;
        100.0 * (sum(&self.apart) / sum(&self.together) - 1.0)
    }
}

/// Which is better, at each rate.
fn conclusion(all: &[Compared]) -> String {
    /// Less than this many per cent is no difference.
    const ALIKE: f64 = 3.0;
    let mut text = String::from("\nBoth vCPUs taken together:");
    for compared in all {
        let percent = compared.percent();
        let (rate, much) = (in_words(compared.rate), percent.abs());
        let verdict = match percent {
            _ if !compared.is_judged => "not judged, the cores were not free".to_string(),
            _ if much < ALIKE => format!("alike, within {ALIKE:.0} %"),
            longer if longer > 0.0 => format!("beside the mailbox is better, by {much:.0} %"),
            _ => format!("on a line of its owner is better, by {much:.0} %"),
        };
        text += &format!("\n  posts {rate}: {verdict}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(together: [f64; 2], apart: [f64; 2]) -> Compared {
        let one = |value| Spread::of(&[value]).expect("has a value");
        let ratio = [apart[0] / together[0], apart[1] / together[1]].map(one);
        Compared {
            rate: Some(16),
            is_judged: true,
            together: together.map(one),
            apart: apart.map(one),
            ratio,
            turns: Vec::new(),
        }
    }

    #[test]
    fn what_is_better_is_told_from_both_sides_together() {
        assert!(
            conclusion(&[compared([100.0, 100.0], [80.0, 140.0])]).ends_with("beside the mailbox is better, by 10 %")
        );
        assert!(
            conclusion(&[compared([100.0, 100.0], [60.0, 100.0])]).ends_with("line of its owner is better, by 20 %")
        );
        assert!(conclusion(&[compared([100.0, 100.0], [98.0, 104.0])]).ends_with("alike, within 3 %"));
        let disturbed = Compared { is_judged: false, ..compared([1.0, 1.0], [9.0, 9.0]) };
        assert!(conclusion(&[disturbed]).contains("not judged"));
    }

    #[test]
    fn both_layouts_meet_what_is_posted_and_are_outside_in_the_end() {
        fn check<V: Vcpu>() {
            let vcpu = V::new();
            vcpu.mailbox().run_on(CpuId(0));
            vcpu.post();
            assert!(vcpu.mailbox().has_work());
            vcpu.pass(0);
            assert!(!vcpu.mailbox().has_work() && !vcpu.presence().is_inside());
            assert_eq!(vcpu.state()[7].get(), 1);
        }
        check::<Together>();
        check::<Apart>();
    }

    #[test]
    fn presence_is_on_the_mailboxs_line_in_one_layout_and_on_its_owners_in_the_other() {
        use std::mem::offset_of;
        use vcpu_layout::LINE;
        assert!(size_of::<Reach>() <= 64 && offset_of!(Together, reach) / LINE != offset_of!(Together, state) / LINE);
        assert_ne!(offset_of!(Apart, mailbox) / LINE, offset_of!(Apart, presence) / LINE);
        assert_eq!(offset_of!(Apart, presence) / LINE, offset_of!(Apart, state) / LINE);
    }

    #[test]
    fn every_batch_has_some_posts() {
        for rate in RATES.into_iter().flatten() {
            assert!(operations(Some(rate)) / rate >= 8);
        }
    }
}
