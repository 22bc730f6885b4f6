//! Both ways to compute the intervals agree, and the order is as documented.

use flash_dma_problem::Interval;
use flash_dma_reference::generate::Scores;
use flash_dma_reference::{Rng, select};

#[test]
fn the_heap_gives_the_intervals_of_the_definition() {
    let mut rng = Rng::new(1);
    for kind in Scores::ALL {
        for len in [0, 1, 2, 17, 64, 113] {
            for window in [1, 2, 7, 32, len.max(1), len + 1, usize::MAX] {
                let scores = kind.head(len, &mut rng);
                let by_heap = select::intervals_by_heap(&scores, window);
                let exact = select::intervals(&scores, window);
                assert_eq!(exact, by_heap, "{kind:?} {len} {window}");
            }
        }
    }
}

#[test]
fn the_intervals_hold_exactly_the_selected_sets() {
    let mut rng = Rng::new(2);
    for kind in Scores::ALL {
        let scores = kind.head(50, &mut rng);
        let intervals = select::intervals_by_heap(&scores, 9);
        for position in -2..50 {
            let holds = |&j: &usize| intervals[j].contains(position);
            let held: Vec<usize> = (0..50).filter(holds).collect();
            let selected = select::selected(&scores, 9, position);
            assert_eq!(held, selected, "{kind:?} {position}");
        }
    }
}

#[test]
fn ties_go_to_the_lower_index_and_nan_ranks_below_every_number() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let scores = [nan, -0.0, 0.0, -inf, f64::MIN, nan, inf, -0.0];
    assert_eq!(select::ranked(&scores), [6, 1, 2, 7, 4, 0, 5]);
    assert_eq!(select::selected(&scores, 3, 7), [1, 2, 6]);
    assert_eq!(select::selected(&scores, 5, 5), [0, 1, 2, 4, 5]);
    assert_eq!(select::selected(&scores, 9, -1), [0usize; 0]);
}

#[test]
fn a_small_selection_by_hand() {
    // w = 2: key 0 falls to the second better key (2), key 1 to key 3, key 4 is dead on arrival.
    let scores = [1.0, 2.0, 3.0, 4.0, 0.0];
    let expected =
        [(0, 2), (1, 3), (2, 5), (3, 5), (4, 4)].map(|(first, end)| Interval { first, end });
    assert_eq!(select::intervals(&scores, 2), expected);
}

#[test]
fn a_long_head_is_selected_in_a_moment() {
    let scores = Scores::Normal.head(1 << 17, &mut Rng::new(3));
    let intervals = select::intervals_by_heap(&scores, 2048);
    let live = intervals.iter().filter(|i| i.contains((1 << 17) - 1));
    assert_eq!(live.count(), 2048);
    // The expected number of keys ever attended, w (1 + ln(N/w)) = 10565, within 5 %.
    let ever = intervals.iter().filter(|i| !i.is_empty()).count();
    assert!((10_037..=11_093).contains(&ever), "{ever}");
}
