//! Text on a framebuffer: an output-only terminal, for a machine without a serial port.
//!
//! A grid of characters holds the text. A framebuffer is slow to write and slower to read. So only changed characters
//! are drawn, and at the last line the text scrolls by a quarter of the screen at once. Escape sequences, with which
//! guests colour their consoles, are dropped.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

const WEIGHT: FontWeight = FontWeight::Regular;
const SIZE: RasterHeight = RasterHeight::Size16;
/// Pixels of a character's cell.
const CELL_WIDTH: usize = get_raster_width(WEIGHT, SIZE);
const CELL_HEIGHT: usize = SIZE.val();
/// Replaces characters that the font does not have.
const UNKNOWN: char = '?';
const TAB: usize = 8;

/// A surface that is drawn on.
pub trait Pixels {
    /// Width and height in pixels.
    fn size(&self) -> (usize, usize);
    /// Draws a grey pixel, from black (0) to white (255). It is within [`Self::size`].
    fn set(&mut self, x: usize, y: usize, intensity: u8);
}

/// Where in an escape sequence the text is (ECMA-48, 5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    /// In none.
    No,
    /// Behind ESC.
    Begun,
    /// Behind ESC and [, before the letter that ends it.
    Control,
}

/// Bytes for the cells of a screen with 4096 by 2160 pixels. A larger one is used in part.
pub const MOST_CELLS: usize = (4096 / CELL_WIDTH) * (2160 / CELL_HEIGHT);

/// The terminal.
pub struct Screen<'c, P> {
    pixels: P,
    columns: usize,
    rows: usize,
    /// The character of each cell, row by row.
    cells: &'c mut [u8],
    column: usize,
    row: usize,
    escape: Escape,
}

impl<'c, P: Pixels> Screen<'c, P> {
    /// An empty screen, with room in `cells` for its text. `None` if not even one character fits.
    pub fn new(mut pixels: P, cells: &'c mut [u8]) -> Option<Self> {
        let (width, height) = pixels.size();
        let columns = width / CELL_WIDTH;
        let rows = (height / CELL_HEIGHT).min(cells.len().checked_div(columns)?);
        let cells = cells.get_mut(..columns * rows).filter(|cells| !cells.is_empty())?;
        for y in 0..height {
            (0..width).for_each(|x| pixels.set(x, y, 0));
        }
        cells.fill(b' ');
        Some(Self { pixels, columns, rows, cells, column: 0, row: 0, escape: Escape::No })
    }

    /// The surface, without the text.
    pub fn into_pixels(self) -> P {
        self.pixels
    }

    /// Writes text. Bytes that are no ASCII are a question mark for each character.
    pub fn write(&mut self, text: &[u8]) {
        for &byte in text {
            self.escape = match (self.escape, byte) {
                (_, 0x1b) => Escape::Begun,
                (Escape::Begun, b'[') => Escape::Control,
                (Escape::Control, 0x20..=0x3f) => Escape::Control,
                (Escape::Begun | Escape::Control, _) => Escape::No,
                (Escape::No, _) => {
                    self.put(byte);
                    Escape::No
                }
            };
        }
    }

    fn put(&mut self, byte: u8) {
        match byte {
            b'\n' => self.new_line(),
            b'\r' => self.column = 0,
            b'\t' => self.column = (self.column / TAB + 1) * TAB,
            0x08 => self.column = self.column.saturating_sub(1),
            // Other control characters, and the second and later bytes of a character in UTF-8.
            0..=0x1f | 0x7f..=0xbf => {}
            _ => {
                if self.column >= self.columns {
                    self.new_line();
                }
                self.show(self.row * self.columns + self.column, byte);
                self.column += 1;
            }
        }
    }

    /// The start of the next row: a guest with a raw console ends lines by LF alone.
    fn new_line(&mut self) {
        self.column = 0;
        if self.row + 1 < self.rows {
            self.row += 1;
            return;
        }
        let up = (self.rows / 4).max(1);
        self.row = self.rows - up;
        for at in 0..self.cells.len() {
            let byte = self.cells.get(at + up * self.columns).copied().unwrap_or(b' ');
            self.show(at, byte);
        }
    }

    /// Lets a cell show this character.
    fn show(&mut self, at: usize, byte: u8) {
        if self.cells[at] == byte {
            return;
        }
        self.cells[at] = byte;
        let (left, top) = (at % self.columns * CELL_WIDTH, at / self.columns * CELL_HEIGHT);
        let glyph = get_raster(char::from(byte), WEIGHT, SIZE).or_else(|| get_raster(UNKNOWN, WEIGHT, SIZE));
        let Some(glyph) = glyph else { return };
        for (y, row) in glyph.rows().enumerate() {
            for (x, &intensity) in row.iter().enumerate() {
                self.pixels.set(left + x, top + y, intensity);
            }
        }
    }
}

#[cfg(test)]
mod tests;
