//! Named spans of `tracing` around calls and around the operations of the engines that have none of their own: those of
//! `flash-dma-kernels` open theirs where they launch.

/// Opens a span for the rest of the block. Without a subscriber it costs a comparison.
macro_rules! span {
    ($name:literal $(, $($fields:tt)+)?) => {
        tracing::debug_span!(target: "flash_dma", $name $(, $($fields)+)?).entered()
    };
}
pub(crate) use span;
