//! Letters for the plots.
//!
//! A bitmap has no fonts, a build machine often has none installed, and a font file is a binary to
//! carry about. These are all the characters the plots use: five dots wide, seven high, small
//! letters drawn as capitals.

/// Width of a glyph in dots.
pub const WIDTH: i32 = 5;

/// Height of a glyph in dots.
pub const HEIGHT: i32 = 7;

/// Dots from one glyph's left edge to the next one's.
pub const ADVANCE: i32 = WIDTH + 1;

/// The dots (x, y) of a text, y downwards from its upper left corner.
///
/// A character without a glyph is drawn as a filled box.
pub fn dots(text: &str) -> impl Iterator<Item = (i32, i32)> {
    text.chars().zip(0..).flat_map(|(character, place)| {
        let rows = glyph(character);
        (0..HEIGHT).zip(rows).flat_map(move |(y, row)| {
            (0..WIDTH)
                .filter(move |x| (row >> (WIDTH - 1 - x)) & 1 == 1)
                .map(move |x| (place * ADVANCE + x, y))
        })
    })
}

/// Width of a text in dots.
pub fn width(text: &str) -> i32 {
    (text.chars().count() as i32 * ADVANCE - (ADVANCE - WIDTH)).max(0)
}

fn glyph(character: char) -> [u8; HEIGHT as usize] {
    let character = character.to_ascii_uppercase();
    let found = GLYPHS.iter().find(|(name, _)| *name == character);
    found.map_or([0b11111; HEIGHT as usize], |(_, rows)| *rows)
}

#[rustfmt::skip]
const GLYPHS: [(char, [u8; HEIGHT as usize]); 46] = [
    ('0', [0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110]),
    ('1', [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110]),
    ('2', [0b01110, 0b10001, 0b00001, 0b00110, 0b01000, 0b10000, 0b11111]),
    ('3', [0b11110, 0b00001, 0b00001, 0b01110, 0b00001, 0b00001, 0b11110]),
    ('4', [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010]),
    ('5', [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110]),
    ('6', [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110]),
    ('7', [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000]),
    ('8', [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110]),
    ('9', [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100]),
    ('A', [0b01110, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001]),
    ('B', [0b11110, 0b10001, 0b10001, 0b11110, 0b10001, 0b10001, 0b11110]),
    ('C', [0b01110, 0b10001, 0b10000, 0b10000, 0b10000, 0b10001, 0b01110]),
    ('D', [0b11100, 0b10010, 0b10001, 0b10001, 0b10001, 0b10010, 0b11100]),
    ('E', [0b11111, 0b10000, 0b10000, 0b11110, 0b10000, 0b10000, 0b11111]),
    ('F', [0b11111, 0b10000, 0b10000, 0b11110, 0b10000, 0b10000, 0b10000]),
    ('G', [0b01110, 0b10001, 0b10000, 0b10111, 0b10001, 0b10001, 0b01111]),
    ('H', [0b10001, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001]),
    ('I', [0b01110, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110]),
    ('J', [0b00111, 0b00010, 0b00010, 0b00010, 0b00010, 0b10010, 0b01100]),
    ('K', [0b10001, 0b10010, 0b10100, 0b11000, 0b10100, 0b10010, 0b10001]),
    ('L', [0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b11111]),
    ('M', [0b10001, 0b11011, 0b10101, 0b10101, 0b10001, 0b10001, 0b10001]),
    ('N', [0b10001, 0b11001, 0b11001, 0b10101, 0b10011, 0b10011, 0b10001]),
    ('O', [0b01110, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110]),
    ('P', [0b11110, 0b10001, 0b10001, 0b11110, 0b10000, 0b10000, 0b10000]),
    ('Q', [0b01110, 0b10001, 0b10001, 0b10001, 0b10101, 0b10010, 0b01101]),
    ('R', [0b11110, 0b10001, 0b10001, 0b11110, 0b10100, 0b10010, 0b10001]),
    ('S', [0b01111, 0b10000, 0b10000, 0b01110, 0b00001, 0b00001, 0b11110]),
    ('T', [0b11111, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100]),
    ('U', [0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110]),
    ('V', [0b10001, 0b10001, 0b10001, 0b10001, 0b01010, 0b01010, 0b00100]),
    ('W', [0b10001, 0b10001, 0b10001, 0b10101, 0b10101, 0b11011, 0b10001]),
    ('X', [0b10001, 0b10001, 0b01010, 0b00100, 0b01010, 0b10001, 0b10001]),
    ('Y', [0b10001, 0b10001, 0b01010, 0b00100, 0b00100, 0b00100, 0b00100]),
    ('Z', [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b11111]),
    (' ', [0b00000, 0b00000, 0b00000, 0b00000, 0b00000, 0b00000, 0b00000]),
    ('.', [0b00000, 0b00000, 0b00000, 0b00000, 0b00000, 0b01100, 0b01100]),
    (',', [0b00000, 0b00000, 0b00000, 0b00000, 0b01100, 0b00100, 0b01000]),
    (':', [0b00000, 0b01100, 0b01100, 0b00000, 0b01100, 0b01100, 0b00000]),
    ('-', [0b00000, 0b00000, 0b00000, 0b11111, 0b00000, 0b00000, 0b00000]),
    ('+', [0b00000, 0b00100, 0b00100, 0b11111, 0b00100, 0b00100, 0b00000]),
    ('=', [0b00000, 0b00000, 0b11111, 0b00000, 0b11111, 0b00000, 0b00000]),
    ('/', [0b00001, 0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b10000]),
    ('(', [0b00010, 0b00100, 0b01000, 0b01000, 0b01000, 0b00100, 0b00010]),
    (')', [0b01000, 0b00100, 0b00010, 0b00010, 0b00010, 0b00100, 0b01000]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_drawn_within_its_width() {
        assert_eq!(width(""), 0);
        assert_eq!(width("ab"), 11);
        assert_eq!(dots("ab").map(|(x, _)| x).max(), Some(10));
        assert!(dots("-").all(|(x, y)| (0..5).contains(&x) && y == 3));
        assert_eq!(dots(" ").count(), 0);
        assert!(dots("abc").eq(dots("ABC")));
    }

    #[test]
    fn no_two_glyphs_are_alike() {
        for (i, (a, rows)) in GLYPHS.iter().enumerate() {
            for (b, others) in &GLYPHS[..i] {
                assert_ne!(rows, others, "{a} and {b}");
            }
        }
    }
}
