//! Named `tracing` spans around calls, and around the operations of engines that have none of their own:
//! `flash-dma-kernels` opens its spans where it launches.

/// Opens a span for the rest of the block. Without a subscriber it costs a comparison.
macro_rules! span {
    ($name:literal $(, $($fields:tt)+)?) => {
        tracing::debug_span!(target: "flash_dma", $name $(, $($fields)+)?).entered()
    };
}
pub(crate) use span;
