//! Tokens held back from a cache until it is known how many of them stay.

use super::tokens::Rows;
use flash_dma_problem::{Appending, AttentionError};

/// State of holding: whether the tokens of a step are appended or wait.
#[derive(Clone, Debug, Default)]
pub(crate) enum Hold {
    /// Tokens are appended.
    #[default]
    Off,
    /// The tokens of the next step will wait.
    Next,
    /// These tokens wait.
    Tokens(Box<Rows>),
}

impl Hold {
    pub(crate) fn waiting(&self) -> usize {
        match self {
            Self::Off | Self::Next => 0,
            Self::Tokens(tokens) => tokens.shape()[2],
        }
    }

    /// Refuses other calls while tokens wait: these follow the cache's current contents.
    pub(crate) fn check(&self) -> Result<(), AttentionError> {
        match self {
            Self::Off | Self::Next => Ok(()),
            Self::Tokens(_) => Err(AttentionError::TokensWait {
                waiting: self.waiting(),
            }),
        }
    }

    pub(super) fn begin(&mut self) -> Result<(), AttentionError> {
        self.check()?;
        *self = Self::Next;
        Ok(())
    }

    /// Ends holding and returns the first `count` waiting tokens, which are to be appended; `None` for no tokens. An
    /// error changes nothing.
    pub(super) fn end(&mut self, count: usize) -> Result<Option<Rows>, AttentionError> {
        let waiting = self.waiting();
        let first = match self {
            Self::Off => return Err(AttentionError::NotHolding),
            _ if count > waiting => {
                return Err(AttentionError::TooManyAccepted { count, waiting });
            }
            Self::Tokens(tokens) if count > 0 => Some(tokens.first(count)),
            Self::Next | Self::Tokens(_) => None,
        };
        *self = Self::Off;
        Ok(first)
    }

    /// When the tokens of the next step are appended.
    pub(crate) fn appending(&self) -> Appending {
        match self {
            Self::Off => Appending::Now,
            Self::Next | Self::Tokens(_) => Appending::Later,
        }
    }
}

/// Holding, for either kind of cache.
macro_rules! holds {
    ($cache:ty) => {
        impl $cache {
            twin! {
                /// Holds back the tokens of the next step: the step attends as always, but its tokens stay outside
                /// the cache, whose slots or pages and [`lengths`](Self::lengths) do not change, until
                /// [`accept`](Self::accept) says how many of them were right. Meanwhile the cache refuses every other
                /// call that would change or save it. A clone has the same tokens waiting. In a cache of pages,
                /// waiting tokens occupy their pages.
                ///
                /// A second call before the step has no effect, and [`append`](Self::append) appends as always.
                pub fn hold(&mut self) = Self::try_hold;
            }

            /// Like [`hold`](Self::hold), but returns the error.
            ///
            /// # Errors
            ///
            /// [`AttentionError::TokensWait`] if tokens wait already.
            pub fn try_hold(&mut self) -> Result<(), AttentionError> {
                self.hold.begin()
            }

            twin! {
                /// Appends the first `count` waiting tokens as if only these had been stepped, drops the others and
                /// ends holding. The cache is bit for bit the one that received nothing else, except that a pool that
                /// has grown stays as large. 0 ends holding even if no step was taken.
                pub fn accept(&mut self, count: usize) = Self::try_accept;
            }

            /// Like [`accept`](Self::accept), but returns the error.
            ///
            /// # Errors
            ///
            /// [`AttentionError::NotHolding`] without [`hold`](Self::hold), or [`AttentionError::TooManyAccepted`] if
            /// fewer tokens wait. The cache is unchanged then.
            pub fn try_accept(&mut self, count: usize) -> Result<(), AttentionError> {
                let accepted = self.hold.end(count)?;
                self.release_waiting();
                match accepted {
                    Some(tokens) => self.append_new(tokens),
                    None => Ok(()),
                }
            }

            /// Number of tokens per sequence that wait to be [accepted](Self::accept).
            #[must_use]
            pub fn waiting(&self) -> usize {
                self.hold.waiting()
            }
        }
    };
}
pub(super) use holds;
