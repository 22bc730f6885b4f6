//! Refused calls: the right error, and no result that was written.

use flash_dma_problem::{AttentionError as Error, TensorName};
use flash_dma_tests::Refused;

pub fn assert_refused<T>(
    what: &str,
    engine: &str,
    result: Result<T, Refused>,
    expected: impl Fn(&Error) -> bool,
) {
    let Refused { error, written } = result.map(drop).expect_err(what);
    assert!(expected(&error), "{engine} {what}: {error:?}");
    assert!(!written, "{engine} {what}: a result was written");
}

/// True for the error of a tensor's size on an axis.
pub fn shape(name: TensorName, axis: usize) -> impl Fn(&Error) -> bool + Copy {
    move |e| matches!(e, Error::Shape { tensor, axis: a, .. } if (*tensor, *a) == (name, axis))
}

pub fn strides(name: TensorName) -> impl Fn(&Error) -> bool + Copy {
    move |e| matches!(e, Error::Strides { tensor, .. } if *tensor == name)
}

/// True for the error of a tensor's buffer that is too short, or given although the problem has no such tensor.
pub fn buffer(name: TensorName) -> impl Fn(&Error) -> bool + Copy {
    move |e| matches!(e, Error::Buffer { tensor, .. } if *tensor == name)
}

/// True for the error of a result's buffer; `gradient` is that of scores or of a bias.
pub fn result(gradient: TensorName) -> impl Fn(&Error) -> bool {
    use TensorName::{GradKey, GradQuery, GradValue, Lse, Out};
    let results = [Out, Lse, GradQuery, GradKey, GradValue, gradient];
    move |e| results.iter().any(|&name| buffer(name)(e))
}

pub fn rank(name: TensorName) -> impl Fn(&Error) -> bool + Copy {
    move |e| matches!(e, Error::Rank { tensor, .. } if *tensor == name)
}
