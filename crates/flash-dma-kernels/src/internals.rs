//! Access for this project's tests, benchmarks and the example `own-kernel`. It may change in any release.

pub use crate::decode::launch::{DecodeTuning, decode_tuned};
pub use crate::forward::launch::{Tuning, forward_tuned};
pub use crate::host::check::{Layout, check_tensor, elem_type, vector_size};
pub use crate::host::peak::{Peak, peak_of};
pub use crate::matrix::wgmma::alone::products_alone;
pub use crate::pattern::intervals::list_all;

/// The pieces of the portable kernels, for custom kernels: the book's chapter "Write a kernel on our tiles".
pub mod tiles {
    pub use crate::portable::args::Sizes;
    pub use crate::portable::blueprint::{Blueprint, Kernel, Micro};
    pub use crate::portable::intervals::KeyIntervals;
    pub use crate::portable::memory::{NotFinite, Row4, TileRows, load_tile, shared_rows};
    pub use crate::portable::product::products;
    pub use crate::portable::visibility::{Visibility, VisibilityExpand, logit};
}
