// How a buffer is cut into chunks (the unit of the algorithm) and chunks into slices (the unit of pipelining).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcoll {

struct ChunkRange {
  size_t begin = 0;  // element index
  size_t len = 0;    // elements
};

class Layout {
 public:
  // `count` elements in `chunks` chunks, lengths differing by at most one element, longer ones first. Any count works.
  static Layout even(size_t count, size_t chunks) {
    Layout layout;
    layout.chunks_.reserve(chunks);
    const size_t base = count / chunks, extra = count % chunks;
    for (size_t c = 0, at = 0; c < chunks; ++c) {
      const size_t len = base + (c < extra ? 1 : 0);
      layout.chunks_.push_back({at, len});
      at += len;
    }
    return layout;
  }
  // Consecutive chunks of the given lengths.
  static Layout of(const std::vector<size_t>& lengths) {
    Layout layout;
    size_t at = 0;
    for (const size_t len : lengths) {
      layout.chunks_.push_back({at, len});
      at += len;
    }
    return layout;
  }

  size_t num_chunks() const { return chunks_.size(); }
  const ChunkRange& chunk(size_t c) const { return chunks_[c]; }
  // Elements of all chunks.
  size_t total() const { return chunks_.empty() ? 0 : chunks_.back().begin + chunks_.back().len; }
  size_t longest() const {
    size_t most = 0;
    for (const ChunkRange& c : chunks_) most = std::max(most, c.len);
    return most;
  }
  // The round-th slice of chunk c; empty (len 0) once the chunk is used up.
  ChunkRange slice(size_t c, size_t round, size_t slice_elems) const {
    const ChunkRange& chunk = chunks_[c];
    const size_t skip = std::min(round * slice_elems, chunk.len);
    return {chunk.begin + skip, std::min(slice_elems, chunk.len - skip)};
  }

 private:
  std::vector<ChunkRange> chunks_;
};

}  // namespace dcoll
