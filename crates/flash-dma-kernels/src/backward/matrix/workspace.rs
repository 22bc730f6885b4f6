//! The memory that a tensor-core backward pass needs besides its arguments.

use crate::args::Selection;
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::dkdv::shared::gather::KeyParts;
use crate::backward::dkdv::shared::key_sums::KeySums;
use crate::backward::matrix::pass::row_sums_bytes;
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::chunks::ChunkKeys;
use crate::pattern::intervals::order::OrderedKeys;
use crate::pattern::intervals::ranked::RankedKeys;
use crate::pattern::intervals::slices::slice_bytes;
use crate::pattern::intervals::tiles::most_keys;
use flash_dma_problem::Problem;

impl MmaBlueprints {
    /// The bytes of the buffers that [`launch`](crate::backward::matrix::launch::launch()) holds at once at most.
    pub(crate) fn workspace(&self, problem: &Problem, selection: Option<&Selection>) -> usize {
        // Live keys and row sums are held to the end; the lists of dq are freed before those of dk and dv are made, and
        // those before the lists of the keys whose ranks learn, of which there is one at a time.
        let dq = slice_bytes(problem, self.dq.tile.queries());
        let keys = (self.key_bytes(problem)).max(self.rank_bytes(problem, selection));
        LiveKeys::bytes(problem) + row_sums_bytes(problem, *self) + dq.max(keys)
    }

    /// The keys whose ranks learn, and with several chunks those of each. Kept ones take no more than runners-up.
    fn rank_bytes(&self, problem: &Problem, selection: Option<&Selection>) -> usize {
        let far = selection.and_then(|selection| selection.far.as_ref());
        let (Some(far), Some(rank)) = (far, self.rank) else {
            return 0;
        };
        let chunked = match rank.chunks(problem) {
            1 => 0,
            _ => ChunkKeys::bytes(problem, far.max_live, rank.chunk),
        };
        RankedKeys::bytes(problem, selection) + chunked
    }

    /// The keys of each chunk, and the sums or parts of keys with several chunks.
    fn key_bytes(&self, problem: &Problem) -> usize {
        let (dkdv, chunks) = (self.dkdv, self.chunks(problem));
        let listed = match chunks {
            _ if !problem.has_scores => 0,
            1 => OrderedKeys::bytes(problem),
            _ => ChunkKeys::bytes(problem, problem.window, self.chunk),
        };
        listed
            + match (dkdv.parts, dkdv.shared_keys) {
                (true, _) => KeyParts::bytes(problem, chunks, most_keys(problem, self.chunk)),
                (false, true) => KeySums::bytes(problem),
                (false, false) => 0,
            }
    }
}
