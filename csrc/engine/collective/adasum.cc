#include "engine/collective/adasum.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/core/layout.h"
#include "kernels/adaptive_sum.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

constexpr int kChannel = 0;

// Sends one block of memory to a peer and receives another from it, in slices.
class Exchange final : public Pollable {
 public:
  struct Bytes {
    std::byte* data;
    size_t size;
  };
  Exchange(Fabric& fabric, int peer, Bytes out, Bytes in)
      : transport_(*fabric.transport), slice_(fabric.slice_bytes), peer_(peer), out_(out), in_(in) {}

  bool poll(bool& moved) override {
    while (sent_ < out_.size && transport_.post_send(peer_, kChannel, out_.data + sent_, next(sent_, out_))) {
      sent_ += next(sent_, out_);
      moved = true;
    }
    while (received_ < in_.size) {
      while (posted_ < in_.size && transport_.post_recv(peer_, kChannel, in_.data + posted_, next(posted_, in_))) {
        posted_ += next(posted_, in_);
      }
      const std::byte* message = posted_ > received_ ? transport_.front(peer_, kChannel) : nullptr;
      if (message == nullptr) return false;
      const size_t bytes = next(received_, in_);
      if (message != in_.data + received_) std::memcpy(in_.data + received_, message, bytes);
      transport_.pop(peer_, kChannel);
      received_ += bytes;
      moved = true;
    }
    return sent_ == out_.size &&
           (out_.size == 0 || transport_.sent(peer_, kChannel) >= transport_.posted(peer_, kChannel));
  }
  void waiting_for(std::vector<int>& ranks) const override { ranks.push_back(peer_); }

 private:
  size_t next(size_t done, const Bytes& block) const { return std::min(slice_, block.size - done); }

  Messages& transport_;
  const size_t slice_;
  const int peer_;
  const Bytes out_, in_;
  size_t sent_ = 0, posted_ = 0, received_ = 0;
};

// The operand and what is known of its tensors. Its pieces are counted in elements.
class Vectors {
 public:
  explicit Vectors(const Request& r) : data_(static_cast<std::byte*>(r.out)), dtype_(r.dtype) {
    size_t end = 0;
    for (const size_t elements : r.splits) ends_.push_back(end += elements);
    if (ends_.empty()) ends_.push_back(r.count);
    dots_.resize(ends_.size());
    theirs_.resize(ends_.size());
  }

  Exchange::Bytes bytes(Span piece) const {
    return {data_ + piece.begin * dtype_bytes(dtype_), piece.size() * dtype_bytes(dtype_)};
  }
  Exchange::Bytes dots() { return raw(dots_); }
  Exchange::Bytes their_dots() { return raw(theirs_); }

  // Of the piece of two vectors, for each tensor; zero for those that have nothing there. `first`: this rank's vector
  // is a and `other` is b, else the other way round.
  void multiply(Span piece, bool first, const std::byte* other) {
    std::fill(dots_.begin(), dots_.end(), kernels::Dots{});
    for_tensors(piece, [&](size_t tensor, Span part) {
      const std::byte* mine = bytes(part).data;
      const std::byte* theirs = other + (part.begin - piece.begin) * dtype_bytes(dtype_);
      dots_[tensor] = kernels::dots(first ? mine : theirs, first ? theirs : mine, part.size(), dtype_);
    });
  }
  void add_their_dots() {
    for (size_t i = 0; i < dots_.size(); ++i) {
      dots_[i].ab += theirs_[i].ab;
      dots_[i].aa += theirs_[i].aa;
      dots_[i].bb += theirs_[i].bb;
    }
  }
  void combine(Span piece, bool first, const std::byte* other) {
    for_tensors(piece, [&](size_t tensor, Span part) {
      std::byte* mine = bytes(part).data;
      const std::byte* theirs = other + (part.begin - piece.begin) * dtype_bytes(dtype_);
      const kernels::Dots& dots = dots_[tensor];
      const double a = factor(dots.ab, dots.aa), b = factor(dots.ab, dots.bb);
      kernels::weighted_sum(mine, mine, first ? a : b, theirs, first ? b : a, part.size(), dtype_);
    });
  }

 private:
  static Exchange::Bytes raw(std::vector<kernels::Dots>& dots) {
    return {reinterpret_cast<std::byte*>(dots.data()), dots.size() * sizeof(kernels::Dots)};
  }
  // Below this a norm counts as zero, as it does in Horovod: the quotient would mean nothing.
  static double factor(double ab, double norm) { return norm >= std::sqrt(DBL_MIN) ? 1.0 - ab / norm * 0.5 : 1.0; }

  template <typename Body>
  void for_tensors(Span piece, const Body& body) const {
    size_t tensor = std::upper_bound(ends_.begin(), ends_.end(), piece.begin) - ends_.begin();
    for (size_t begin = piece.begin; begin < piece.end; begin = ends_[tensor++]) {
      const Span part{begin, std::min(ends_[tensor], piece.end)};
      if (part.size() > 0) body(tensor, part);
    }
  }

  std::byte* data_;
  DType dtype_;
  std::vector<size_t> ends_;  // of each tensor, in elements
  std::vector<kernels::Dots> dots_, theirs_;
};

struct Level {
  int peer;
  Span kept, given;
};

}  // namespace

Task move_by_adasum(Fabric& f, Operation& op) {
  const Request& r = op.request;
  op.phases.enter(Phase::kMove);
  op.phases.name_algorithm("adasum");
  kernels::scale(r.out, r.in, r.count, r.dtype, r.prescale);
  Vectors vectors(r);
  Span piece{0, r.count};
  const auto received = Memory::uninitialized((r.count + 1) / 2 * dtype_bytes(r.dtype));
  std::vector<Level> levels;

  for (int distance = 1; distance < f.size; distance *= 2) {
    const int peer = f.rank ^ distance;
    const bool first = f.rank < peer;
    const size_t middle = piece.begin + piece.size() / 2;
    const Span low{piece.begin, middle}, high{middle, piece.end};
    levels.push_back({peer, first ? low : high, first ? high : low});
    const Level level = levels.back();
    piece = level.kept;

    Exchange halves(f, peer, vectors.bytes(level.given), {received->data(), vectors.bytes(piece).size});
    co_await halves;
    vectors.multiply(piece, first, received->data());
    for (int apart = 1; apart <= distance; apart *= 2) {  // recursive doubling over the group of 2 * distance ranks
      Exchange sums(f, f.rank ^ apart, vectors.dots(), vectors.their_dots());
      co_await sums;
      vectors.add_their_dots();
    }
    vectors.combine(piece, first, received->data());
  }
  for (; !levels.empty(); levels.pop_back()) {
    const Level level = levels.back();
    Exchange back(f, level.peer, vectors.bytes(level.kept), vectors.bytes(level.given));
    co_await back;
  }
  if (r.postscale != 1.0) kernels::scale(r.out, r.out, r.count, r.dtype, r.postscale);
}

}  // namespace dcoll
