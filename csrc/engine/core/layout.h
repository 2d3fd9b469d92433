// How a buffer is cut into chunks (the unit of the algorithm) and chunks into slices (the unit of pipelining); into
// parts, one for each rank, and into pieces, which are worked on one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace dcoll {

// From begin to before end, in elements or bytes as its user counts.
struct Span {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};

// The index-th of `parts` parts of `whole`. Parts begin on lines of so many units, so that no two ranks write to one.
inline Span part_on_lines(size_t whole, size_t line, size_t index, size_t parts) {
  const size_t lines = (whole + line - 1) / line;
  return {std::min(whole, lines * index / parts * line), std::min(whole, lines * (index + 1) / parts * line)};
}

// As many pieces of at most `most` as must be, of equal length but for the last, which begin on lines too.
struct EqualPieces {
  EqualPieces() = default;
  EqualPieces(size_t whole, size_t most, size_t line) : total(whole) {
    const size_t lines = (whole + line - 1) / line, lines_per_piece = most / line;
    if (lines == 0) return;
    count = (lines + lines_per_piece - 1) / lines_per_piece;
    length = (lines + count - 1) / count * line;
    count = (whole + length - 1) / length;  // rounding up may have saved the last
  }
  Span piece(size_t k) const { return {k * length, std::min(total, (k + 1) * length)}; }

  size_t total = 0, length = 0, count = 0;
};

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
