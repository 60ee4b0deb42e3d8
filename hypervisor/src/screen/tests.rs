//! The terminal, on a surface that checks its bounds.

use super::{CELL_HEIGHT, CELL_WIDTH, MOST_CELLS, Pixels, Screen};

/// Pixels of a surface of this many cells, and a few that are too few for a cell.
struct Surface {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Surface {
    fn of(columns: usize, rows: usize) -> Self {
        let (width, height) = (columns * CELL_WIDTH + 3, rows * CELL_HEIGHT + 5);
        Self { width, height, pixels: vec![0xaa; width * height] }
    }
}

impl Pixels for Surface {
    fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    fn set(&mut self, x: usize, y: usize, intensity: u8) {
        assert!(x < self.width && y < self.height, "{x}, {y}");
        self.pixels[y * self.width + x] = intensity;
    }
}

fn screen(columns: usize, rows: usize) -> Screen<'static, Surface> {
    Screen::new(Surface::of(columns, rows), vec![0; MOST_CELLS].leak()).expect("cells fit")
}

/// The rows without trailing blanks.
fn rows(screen: &Screen<'_, Surface>) -> Vec<String> {
    let row = |cells: &[u8]| String::from_utf8_lossy(cells).trim_end().to_string();
    screen.cells.chunks(screen.columns).map(row).collect()
}

#[test]
fn lines_appear_one_below_the_other_and_long_ones_go_on_in_the_next_row() {
    let mut screen = screen(5, 4);
    screen.write(b"one\r\ntwo and\n!");
    assert_eq!(rows(&screen), ["one", "two a", "nd", "!"]);
}

#[test]
fn full_screen_moves_up_by_a_quarter() {
    let mut screen = screen(4, 8);
    for line in 0..11 {
        screen.write(format!("{line}\r\n").as_bytes());
    }
    assert_eq!(rows(&screen), ["4", "5", "6", "7", "8", "9", "10", ""]);
}

#[test]
fn escape_sequences_and_control_characters_are_left_out() {
    let mut screen = screen(20, 2);
    screen.write(b"\x1b[2J\x1b[1;31mred\x1b[0m\x07\x1bM\ta\x08b\x1b");
    screen.write(b"[?25lc");
    assert_eq!(rows(&screen)[0], "red     bc");
}

#[test]
fn what_is_no_ascii_is_one_character_each() {
    let mut screen = screen(20, 1);
    screen.write("a\u{e4}\u{20ac}b".as_bytes());
    assert_eq!(screen.cells.iter().filter(|byte| **byte != b' ').count(), 4);
}

#[test]
fn characters_are_drawn_in_their_cells_only() {
    let mut screen = screen(3, 2);
    screen.write(b"\n M");
    let lit = |screen: &Screen<'_, Surface>, column: usize, row: usize| {
        let cell = (0..CELL_HEIGHT).flat_map(|y| (0..CELL_WIDTH).map(move |x| (x, y)));
        cell.filter(|(x, y)| {
            let at = (row * CELL_HEIGHT + y) * screen.pixels.width + column * CELL_WIDTH + x;
            screen.pixels.pixels[at] != 0
        })
        .count()
    };
    assert!(lit(&screen, 1, 1) > CELL_HEIGHT);
    for (column, row) in [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)] {
        assert_eq!(lit(&screen, column, row), 0, "{column}, {row}");
    }
    // A blank wipes it out.
    screen.write(b"\x08 ");
    assert_eq!(lit(&screen, 1, 1), 0);
}

#[test]
fn surface_without_room_for_a_character_is_no_screen() {
    for (columns, rows) in [(0, 1), (1, 0), (0, 0)] {
        assert!(Screen::new(Surface::of(columns, rows), &mut [0; 100]).is_none());
    }
    assert!(Screen::new(Surface::of(10, 10), &mut [0; 9]).is_none());
}

#[test]
fn screen_of_more_cells_than_there_is_room_for_is_used_in_its_upper_part() {
    let mut cells = [0; 35];
    let mut screen = Screen::new(Surface::of(10, 10), &mut cells).expect("cells fit");
    for _ in 0..100 {
        screen.write(b"0123456789");
    }
    assert_eq!(screen.rows, 3);
}

#[test]
fn any_bytes_do_no_harm() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut screen = screen(3, 2);
    for _ in 0..20_000 {
        screen.write(&[rng.u8(..), rng.u8(..), rng.u8(..)]);
    }
}
