//! `burn_flash_dma::testing::check_gradients`, which users run on their own shapes.

use burn_flash_dma::testing::{GradientCheck, GradientError, check_gradients, try_check_gradients};
use flash_dma_tests::prelude::*;

every_burn!(
    good_gradients_pass,
    seeds_draw_other_inputs,
    what_cannot_be_checked_is_refused,
);

fn problem(
    q: [usize; 4],
    kv: [usize; 4],
    element: ElementType,
    options: AttentionOptions,
) -> Problem {
    let scores = options.keep_window.map(|_| &kv[..3]);
    Problem::new(&q, &kv, &kv, scores, element, &options).unwrap()
}

fn good_gradients_pass<B: Backend>(burn: &Burn<B>) {
    let window = |w| AttentionOptions::new().with_keep_window(w);
    let (capped, full) = (window(9).with_softcap(2.0), window(20).with_causal(false));
    let mut problems = vec![problem([1, 2, 5, 16], [1, 1, 40, 16], F32, window(7))];
    if B::SIZE > Size::Small {
        problems.extend([
            // Few queries after many keys, and a window that prunes.
            problem([2, 12, 3, 64], [2, 3, 1773, 64], F16, window(728)),
            problem([1, 3, 60, 64], [1, 1, 900, 64], Bf16, window(100)),
            problem([2, 4, 257, 32], [2, 2, 257, 32], Bf16, window(31)),
            problem([1, 2, 90, 24], [1, 2, 50, 24], F32, capped),
            problem([1, 2, 33, 32], [1, 1, 70, 32], F32, AttentionOptions::new()),
            problem([1, 2, 64, 32], [1, 1, 64, 32], F32, full),
        ]);
    }
    for problem in problems {
        if !burn.supports(problem.element) {
            continue;
        }
        let report = check_gradients(&problem, burn.device());
        let comparisons = if problem.has_scores { 10 } else { 8 };
        assert_eq!(report.checked.len(), comparisons, "{report}");
        assert!(report.checked.iter().all(|c| c.rows > 0), "{report}");
        let worst = report.worst();
        assert!(worst.worst.ratio > 0.0 && worst.worst.ratio <= 1.0);
        assert!(report.to_string().contains(&worst.tensor.to_string()));
    }
}

fn seeds_draw_other_inputs<B: Backend>(burn: &Burn<B>) {
    let options = AttentionOptions::new().with_keep_window(7);
    let problem = problem([1, 2, 5, 16], [1, 1, 40, 16], F32, options);
    let check = GradientCheck::new(&problem).with_samples(3, 6);
    let run = |seed| check.clone().with_seed(seed).run(burn.device()).unwrap();
    assert_eq!(run(1).checked[0], run(1).checked[0]);
    assert_ne!(run(1).checked[0].worst, run(2).checked[0].worst);
}

fn what_cannot_be_checked_is_refused<B: Backend>(burn: &Burn<B>) {
    let options = AttentionOptions::new().with_keep_window(7);
    let empty = problem([1, 2, 0, 16], [1, 1, 40, 16], F32, options);
    let error = try_check_gradients(&empty, burn.device()).unwrap_err();
    assert!(matches!(error, GradientError::Empty), "{error}");
    // The fields are public, so a problem may be spoiled.
    let mut spoiled = problem([1, 2, 5, 16], [1, 1, 40, 16], F32, options);
    spoiled.window = 0;
    let error = try_check_gradients(&spoiled, burn.device()).unwrap_err();
    assert!(
        matches!(error, GradientError::Refused(AttentionError::ZeroWindow)),
        "{error}"
    );
}
