//! A child's doorbells: writes to addresses without memory that its parent hears of while the child goes on.
//!
//! The parent's description of its children has the rules for them. This is the list that the child's exits look at, so
//! it has a lock of its own, and a child without doorbells does not take it.

use alloc::vec::Vec;

use addr::Gpa;
use hyperv_defs::interrupt::Doorbell;
use spin::RwLock;

use crate::frames::Exhausted;
use crate::sync::{AtomicU32, Ordering};

/// A port of the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// Its place in the table of all ports.
    pub(crate) place: u32,
    /// Its number. Another port may have the place by now.
    pub(crate) number: u32,
}

/// The doorbells of one child.
pub(crate) struct Doorbells {
    count: AtomicU32,
    /// By address; of those at the same one, the first that was connected rings.
    list: RwLock<Vec<Connection>>,
}

struct Connection {
    number: u32,
    doorbell: Doorbell,
    port: Port,
}

impl Doorbells {
    /// None.
    pub(crate) fn new() -> Self {
        Self { count: AtomicU32::new(0), list: RwLock::new(Vec::new()) }
    }

    /// Connects a doorbell to a port. `number` names the connection.
    ///
    /// # Errors
    /// The host has too little memory.
    pub(crate) fn connect(&self, number: u32, doorbell: Doorbell, port: Port) -> Result<(), Exhausted> {
        let mut list = self.list.write();
        list.try_reserve(1).map_err(|_| Exhausted)?;
        let at = list.partition_point(|other| other.doorbell.gpa <= doorbell.gpa);
        list.insert(at, Connection { number, doorbell, port });
        self.count.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Takes a connection away, if it is there.
    pub(crate) fn disconnect(&self, number: u32) {
        let mut list = self.list.write();
        if let Some(at) = list.iter().position(|other| other.number == number) {
            list.remove(at);
            self.count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether there may be a doorbell at this address.
    pub(crate) fn is_at(&self, gpa: Gpa) -> bool {
        self.count.load(Ordering::Acquire) != 0
            && self.list.read().binary_search_by_key(&gpa, |other| other.doorbell.gpa).is_ok()
    }

    /// The port that this write rings. `value` is zero above its `bytes`.
    pub(crate) fn find(&self, gpa: Gpa, bytes: u8, value: u64) -> Option<Port> {
        let list = self.list.read();
        let at = list.partition_point(|other| other.doorbell.gpa < gpa);
        let here = list[at..].iter().take_while(|other| other.doorbell.gpa == gpa);
        let mut ringing = here.filter(|other| other.doorbell.rings(gpa, bytes, value));
        ringing.next().map(|connection| connection.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_rings_the_first_doorbell_that_wants_it() {
        let doorbells = Doorbells::new();
        let bell = |gpa, bytes, value| Doorbell { gpa: Gpa(gpa), bytes, value };
        let port = |number| Port { place: number, number };
        let connect = |number, bell| assert_eq!(doorbells.connect(number, bell, port(number)), Ok(()));
        let find = |gpa, bytes, value| doorbells.find(Gpa(gpa), bytes, value).map(|port| port.number);
        assert!(!doorbells.is_at(Gpa(0x2000)));

        connect(1, bell(0x2000, Some(2), Some(7)));
        connect(2, bell(0x1000, None, None));
        connect(3, bell(0x2000, Some(2), None));
        connect(4, bell(0x2000, None, None));
        assert_eq!(find(0x2000, 2, 7), Some(1));
        assert_eq!(find(0x2000, 2, 8), Some(3));
        assert_eq!(find(0x2000, 4, 7), Some(4));
        assert_eq!(find(0x1000, 1, 0), Some(2));
        assert_eq!(find(0x1001, 1, 0), None);
        assert!(doorbells.is_at(Gpa(0x2000)) && !doorbells.is_at(Gpa(0x2001)));

        for number in [4, 4, 3, 1, 2] {
            doorbells.disconnect(number);
        }
        assert!(!doorbells.is_at(Gpa(0x2000)) && !doorbells.is_at(Gpa(0x1000)));
    }
}
