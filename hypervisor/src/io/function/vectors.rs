//! The vectors of the pCPUs that functions of VMs send.
//!
//! Each message of a function that its guest has let through has a vector of a pCPU for itself. So a vector that
//! arrives says which function has sent which message. The pCPU only takes it: the guest's vCPU may be anywhere.

use alloc::vec::Vec;

use crate::io::pins::{FIRST_VECTOR, LAST_VECTOR};

/// Vectors of a pCPU.
const COUNT: usize = LAST_VECTOR as usize - FIRST_VECTOR as usize + 1;

/// Who has which vector of which pCPU.
#[derive(Debug)]
pub struct Vectors<T>(Vec<OfCpu<T>>);

#[derive(Debug)]
struct OfCpu<T> {
    cpu: u32,
    used: Vec<(u8, T)>,
}

/// A vector of a pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector {
    /// The pCPU's number.
    pub cpu: u32,
    /// The vector.
    pub vector: u8,
}

impl<T> Vectors<T> {
    /// None is used on any pCPU.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Takes a vector of one of these pCPUs, of the one that has the fewest in use. `None`: all are in use.
    pub fn take(&mut self, cpus: impl Iterator<Item = u32>, what: T) -> Option<Vector> {
        for cpu in cpus {
            if !self.0.iter().any(|of| of.cpu == cpu) {
                self.0.push(OfCpu { cpu, used: Vec::new() });
            }
        }
        let of = self.0.iter_mut().filter(|of| of.used.len() < COUNT).min_by_key(|of| of.used.len())?;
        let vector = (FIRST_VECTOR..=LAST_VECTOR).find(|vector| !of.used.iter().any(|(used, _)| used == vector))?;
        of.used.push((vector, what));
        Some(Vector { cpu: of.cpu, vector })
    }

    /// Who has this vector.
    pub fn of(&self, Vector { cpu, vector }: Vector) -> Option<&T> {
        let of = self.0.iter().find(|of| of.cpu == cpu)?;
        of.used.iter().find(|(used, _)| *used == vector).map(|(_, what)| what)
    }

    /// Returns a vector.
    pub fn release(&mut self, Vector { cpu, vector }: Vector) {
        if let Some(of) = self.0.iter_mut().find(|of| of.cpu == cpu) {
            of.used.retain(|(used, _)| *used != vector);
        }
    }
}

impl<T> Default for Vectors<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNT, Vector, Vectors};

    #[test]
    fn vectors_are_spread_over_the_cpus_and_belong_to_one_message_each() {
        let mut vectors = Vectors::new();
        let taken: Vec<Vector> = (0..2 * COUNT).filter_map(|what| vectors.take([1, 2].into_iter(), what)).collect();
        assert_eq!(taken.len(), 2 * COUNT);
        for (what, vector) in taken.iter().enumerate() {
            assert_eq!(vectors.of(*vector), Some(&what));
            assert_eq!(vector.cpu as usize, what % 2 + 1);
            assert!((0x20..=0xef).contains(&vector.vector));
        }
        assert_eq!(vectors.take([1, 2].into_iter(), 0), None, "all are in use");
    }

    #[test]
    fn returned_vector_is_nobodys_until_it_is_taken_again() {
        let mut vectors = Vectors::new();
        let first = vectors.take([0].into_iter(), "a").expect("is free");
        let second = vectors.take([0].into_iter(), "b").expect("is free");
        vectors.release(first);
        assert_eq!((vectors.of(first), vectors.of(second)), (None, Some(&"b")));
        assert_eq!(vectors.of(Vector { cpu: 9, vector: 0x20 }), None);
        vectors.release(Vector { cpu: 9, vector: 0x20 });
        assert_eq!(vectors.take([0].into_iter(), "c"), Some(first));
    }
}
