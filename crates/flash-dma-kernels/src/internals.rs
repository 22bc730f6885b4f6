//! The kernels' doors for this project's tests and benchmarks. They may change in any release.

pub use crate::decode::launch::{DecodeTuning, decode_tuned};
pub use crate::forward::launch::{Tuning, forward_tuned};
pub use crate::host::peak::{Peak, peak_of};
pub use crate::matrix::wgmma::alone::products_alone;
pub use crate::pattern::intervals::list_all;
