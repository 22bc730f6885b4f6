//! Named ranges around the host side of every operation: a span of `tracing`, and with the feature `nvtx` a range of
//! NVIDIA's tools where their library is present.

#[cfg(all(feature = "nvtx", unix))]
mod nvtx;

use tracing::span::EnteredSpan;

pub(crate) const TARGET: &str = "flash_dma";

/// An open range, which ends when it is dropped and covers everything launched in between. Made by [`range`].
#[must_use = "a range ends when it is dropped"]
pub(crate) struct Range {
    _span: EnteredSpan,
    #[cfg(all(feature = "nvtx", unix))]
    _nvtx: nvtx::Range,
}

impl Range {
    /// Opens a range for a span, with the same name ending in a zero byte.
    pub(crate) fn new(span: tracing::Span, name: &'static str) -> Self {
        #[cfg(not(all(feature = "nvtx", unix)))]
        let _ = name;
        Self {
            _span: span.entered(),
            #[cfg(all(feature = "nvtx", unix))]
            _nvtx: nvtx::Range::new(name),
        }
    }
}

/// Opens a range with a name and fields in the syntax of `tracing`. Without a subscriber it costs a comparison.
macro_rules! range {
    ($name:literal $(, $($fields:tt)+)?) => {
        $crate::host::range::Range::new(
            tracing::debug_span!(target: $crate::host::range::TARGET, $name $(, $($fields)+)?),
            concat!("flash_dma ", $name, "\0"),
        )
    };
}
pub(crate) use range;
