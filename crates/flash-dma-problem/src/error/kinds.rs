//! The names of the errors.

use super::AttentionError;

/// Implements the variants' names, by a match that the compiler checks for completeness.
macro_rules! kinds {
    ($($kind:ident)*) => {
        impl AttentionError {
            /// The names of all variants; a table of tests is complete if it has them all.
            #[doc(hidden)]
            pub const KINDS: &[&str] = &[$(stringify!($kind)),*];

            /// The name of the variant.
            #[doc(hidden)]
            #[must_use]
            pub fn kind(&self) -> &'static str {
                match self {
                    $(Self::$kind { .. } => stringify!($kind),)*
                }
            }
        }
    };
}

kinds! {
    Rank Shape Broadcast PlanCausal BiasGradient HeadRatio HeadDim ElementType Device RangesDevice Strides Buffer ZeroWindow
    WindowWithoutScores IntervalsWindow WindowParts PartsWithoutWindow HeadWindows SelectionNotCausal DocumentQueries
    DocumentBatch DocumentTokens DocumentCounts MaskedSelection CumulativeLengths IntervalBounds ScoresWithoutIntervals
    ScoresGradient RankGradient Residual Scale Softcap DropoutRate Turns AlibiSlope AlibiHeads Epsilon Rotary NormOperand
    Positions PagesFull EmptyPages CacheScores CacheAlibi CacheWindow CacheNotCausal CacheDropout PagesUsed Sequence TokensWait
    NotHolding TooManyAccepted WholeSequence NoParts NoCaches JoinedCaches Prefix BlockTable Tracked Record TooLarge Grid Engine
    NoEngine Unsupported DeviceFailed Group SecondOrder
}
