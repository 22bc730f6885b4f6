//! Tokens that wait beside a cache until it is known how many of them stay.

use super::tokens::Rows;
use flash_dma_problem::{Appending, AttentionError};

/// What becomes of the tokens of a step.
#[derive(Clone, Debug, Default)]
pub(crate) enum Hold {
    /// They are appended.
    #[default]
    Off,
    /// Those of the next step will wait.
    Next,
    /// These wait.
    Tokens(Box<Rows>),
}

impl Hold {
    /// The number of tokens per sequence that wait.
    pub(crate) fn waiting(&self) -> usize {
        match self {
            Self::Off | Self::Next => 0,
            Self::Tokens(tokens) => tokens.shape()[2],
        }
    }

    /// Refuses while tokens wait: they follow what the cache has been given until then, and nothing else.
    pub(crate) fn check(&self) -> Result<(), AttentionError> {
        match self {
            Self::Off | Self::Next => Ok(()),
            Self::Tokens(_) => Err(AttentionError::TokensWait {
                waiting: self.waiting(),
            }),
        }
    }

    /// Lets the tokens of the next step wait.
    pub(super) fn begin(&mut self) -> Result<(), AttentionError> {
        self.check()?;
        *self = Self::Next;
        Ok(())
    }

    /// Ends holding: the first `count` of the tokens that wait, which are to be appended; nothing if that is none. What
    /// is refused changes nothing.
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

/// Holding, of either kind of cache.
macro_rules! holds {
    ($cache:ty) => {
        impl $cache {
            twin! {
                /// Lets the tokens of the next step wait: the step attends as always, but its tokens stay beside the cache,
                /// whose slots or pages and [`lengths`](Self::lengths) do not change, until [`accept`](Self::accept) says
                /// how many of them were right. While they wait, the cache takes no other call that would change or save
                /// it. A clone has the same tokens waiting. In a cache of pages they have their pages while they wait.
                ///
                /// Before the next step this does nothing a second time, and [`append`](Self::append) appends as always.
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
                /// Appends the first `count` of the tokens that wait, as if only these had been stepped, drops the others
                /// and ends holding: the cache is bit for bit the one that was given nothing else, though a pool that has
                /// grown for them stays as large. 0 ends holding even if no step was taken.
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

            /// The number of tokens per sequence that wait to be [accepted](Self::accept).
            #[must_use]
            pub fn waiting(&self) -> usize {
                self.hold.waiting()
            }
        }
    };
}
pub(super) use holds;
