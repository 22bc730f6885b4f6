//! Keys of the controls: selections without learned scores.

use super::task::{Text, ints};
use crate::arm::Arm;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_flash_dma::{AttentionError, Intervals, Selector, Window, sliding_window};

/// Number of sinks of [`Arm::Sinks`] with a window of 16 or more.
const SINKS: usize = 4;

/// A layer's position in a model, and its data of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Kv heads of a layer.
    pub kv_heads: usize,
    /// Keys per query and kv head.
    pub window: usize,
    /// The texts, which only the oracle reads.
    pub texts: &'a [Text],
}

/// Selection of an arm without scores over `len` tokens; `None` if it attends to all keys.
pub fn without_scores(
    arm: Arm,
    place: Place,
    len: usize,
    device: &Device,
) -> Result<Option<Intervals>, AttentionError> {
    let shape = [place.texts.len(), place.kv_heads, len];
    let window = place.window;
    let level = || Tensor::<3>::zeros(shape, (device, DType::F32));
    Ok(Some(match arm {
        Arm::First => Selector::top(window).sinks(window).try_select(level())?,
        Arm::Sliding => sliding_window(shape, window, device),
        Arm::Sinks => {
            let sinks = SINKS.min(window / 4);
            let selector = Selector::top(window).sinks(sinks).recent(window - sinks);
            selector.try_select(level())?
        }
        Arm::HeadWindows => {
            let windows = head_windows(window, place.kv_heads);
            // Ranked by position, the best keys are the last ones.
            let positions = Tensor::<1, Int>::arange(0..len as i64, (device, DType::I32));
            let positions = positions.cast(FloatDType::F32).reshape([1, 1, len]);
            Selector::top(Window::PerHead(windows)).try_select(positions.expand(shape))?
        }
        Arm::Oracle => oracle(place, len, device)?,
        _ => return Ok(None),
    }))
}

/// Alternating short and long windows, `window` on average over an even number of heads.
fn head_windows(window: usize, kv_heads: usize) -> Vec<usize> {
    let short = (window / 4).max(1);
    let pairs = kv_heads / 2 * 2;
    let of = |head: usize| match head {
        head if head >= pairs => window,
        head if head % 2 == 0 => short,
        _ => 2 * window - short,
    };
    (0..kv_heads).map(of).collect()
}

/// The selection of a selector that knows the questions.
///
/// The true future mass of a key is taken to be that of a model that answers every question by looking at its fact: 1
/// for a fact still to be asked, 0 for every other key. So a head keeps the facts still to be asked, each from its
/// own position to that of its question, and fills the window with the last keys. If there are more facts than the
/// window has room for, the slots (layer, head) share them: slot `s` keeps the `window` facts from `s * window` on,
/// cyclically in the order of the questions, and no recent keys.
pub fn oracle(place: Place, len: usize, device: &Device) -> Result<Intervals, AttentionError> {
    let mut ends = Vec::with_capacity(place.texts.len() * place.kv_heads * len);
    for text in place.texts {
        let facts = text.questions.len();
        let recent = place.window.saturating_sub(facts);
        for head in 0..place.kv_heads {
            let slot = place.layer * place.kv_heads + head;
            let begin = ends.len();
            ends.extend((0..len).map(|key| len.min(key + recent)));
            for kept in 0..place.window.min(facts) {
                let question = text.questions[(slot * place.window + kept) % facts];
                let end = &mut ends[begin + question.fact];
                *end = (*end).max(question.at + 1);
            }
        }
    }
    let shape = [place.texts.len(), place.kv_heads, len];
    Intervals::try_from_ends(ints(ends.into_iter(), shape, device))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::recall::task::{Layout, Pairs};
    use crate::rng::Rng;

    const LEN: usize = 128;

    const POSITIONAL: [Arm; 4] = [Arm::First, Arm::Sliding, Arm::Sinks, Arm::HeadWindows];

    fn texts() -> Vec<Text> {
        let task = Pairs::new(LEN, Layout::Scattered);
        (0..3).map(|n| task.draw(&mut Rng::new(9, n))).collect()
    }

    fn place(texts: &[Text], window: usize) -> Place<'_> {
        Place {
            layer: 1,
            kv_heads: 2,
            window,
            texts,
        }
    }

    /// `[batch, heads, position, key]`.
    fn mask(arm: Arm, place: Place) -> Vec<bool> {
        let intervals = without_scores(arm, place, LEN, &Device::flex());
        let intervals = intervals.expect("a good rule").expect("a pruned arm");
        intervals.as_mask(LEN).into_data().iter().collect()
    }

    #[test]
    fn no_control_attends_to_more_keys_than_the_window_in_the_mean_over_heads() {
        let texts = texts();
        for arm in POSITIONAL.into_iter().chain([Arm::Oracle]) {
            for window in [2, 4, 16, 40] {
                let mask = mask(arm, place(&texts, window));
                for text in mask.chunks(2 * LEN * LEN) {
                    for position in 0..LEN {
                        let row = |head| &text[(head * LEN + position) * LEN..][..LEN];
                        let kept = [0, 1].map(|head| row(head).iter().filter(|&&k| k).count());
                        assert!(kept.iter().sum::<usize>() <= 2 * window, "{arm:?} {window}");
                    }
                }
            }
        }
    }

    #[test]
    fn positional_controls_keep_what_they_say() {
        let texts = texts();
        let expected = |arm, position: usize, head: usize, key: usize| match arm {
            Arm::First => key < 16,
            Arm::Sliding => key + 16 > position,
            Arm::Sinks => key < 4 || key + 12 > position,
            _ => key + [4, 28][head] > position,
        };
        for arm in POSITIONAL {
            for (at, kept) in mask(arm, place(&texts, 16)).into_iter().enumerate() {
                let (head, position, key) = (at / LEN / LEN % 2, at / LEN % LEN, at % LEN);
                let visible = key <= position && expected(arm, position, head, key);
                assert_eq!(kept, visible, "{arm:?} {head} {position} {key}");
            }
        }
    }

    /// With room for a quarter of the facts per slot, the four slots keep all facts together, each until it has been
    /// asked for.
    #[test]
    fn the_oracle_keeps_every_fact_in_some_slot_until_its_question() {
        let texts = texts();
        let masks = [0, 1].map(|layer| {
            let place = Place {
                layer,
                ..place(&texts, 2)
            };
            mask(Arm::Oracle, place)
        });
        for (number, text) in texts.iter().enumerate() {
            for question in &text.questions {
                let slots = masks.iter().flat_map(|mask| {
                    [0, 1].map(|head| {
                        let row = (number * 2 + head) * LEN + question.at;
                        mask[row * LEN + question.fact]
                    })
                });
                assert_eq!(slots.filter(|&kept| kept).count(), 1);
            }
        }
    }
}
