#include "engine/buckets/grouped_rows.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "engine/buckets/group_text.h"
#include "engine/core/layout.h"

namespace dcoll {
namespace {

// The result of an all-gather is put behind the block up to this size; a larger one is memory of its own, for what is
// kept for the next group is shared memory of the node.
constexpr size_t kMostKeptBytes = size_t{16} << 20;

// "8 x 3 float32", or without the rows, where ranks may differ in them.
std::string tensor_text(const RowTensor& tensor, bool with_rows) {
  const std::string elems = compared(tensor.row_dims) ? dims_text(tensor.row_dims) : std::to_string(tensor.row_elems);
  const std::string row = elems + " " + std::string(dtype_name(tensor.dtype));
  return with_rows ? std::to_string(tensor.rows) + " x " + row : "rows of " + row;
}

std::string group_of(const std::vector<RowTensor>& tensors, bool with_rows) {
  const auto text = [&](size_t i) { return tensor_text(tensors[i], with_rows); };
  return group_text(tensors.size(), text, [&](Fingerprint& all, size_t i) {
    const RowTensor& tensor = tensors[i];
    if (with_rows) all.add(tensor.rows);
    all.add(static_cast<uint64_t>(tensor.dtype) | uint64_t{tensor.row_dims.size()} << 8, tensor.row_elems);
    add_dims(all, tensor.row_dims);
  });
}

}  // namespace

size_t bytes_of(const std::vector<RowTensor>& tensors) {
  size_t bytes = 0;
  for (const RowTensor& tensor : tensors) bytes += tensor.rows * tensor.row_bytes();
  return bytes;
}

GroupedRows::GroupedRows(std::shared_ptr<Communicator> comm, std::vector<RowTensor> tensors)
    : comm_(std::move(comm)), tensors_(std::move(tensors)), bytes_(bytes_of(tensors_)) {}

// Before anything is sent: no part without the others.
void GroupedRows::validate() const {
  for (const Part& part : parts_) part.request.validate(comm_->size());
}

void GroupedRows::start(bool by_name) {
  validate();
  for (Part& part : parts_) {
    Request request = part.request;
    if (by_name && request.kind == Kind::kReduceScatter) request.name.append("/").append(dtype_name(request.dtype));
    part.operation = by_name ? comm_->submit_by_name(std::move(request), part.memory)
                             : comm_->submit(std::move(request), Communicator::Start::kSoon, part.memory);
  }
}

void GroupedRows::run(const Wait& wait) {
  validate();
  for (Part& part : parts_) {
    part.operation = comm_->run_or_submit(part.request);
    part.operation->keep = part.memory;  // should the wait be interrupted
    wait(*part.operation);
  }
}

bool GroupedRows::done() const {
  return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) { return comm_->poll(*part.operation); });
}

void GroupedRows::finish(const Wait& wait) {
  for (const Part& part : parts_) wait(*part.operation);
}

GroupedAllGather::GroupedAllGather(std::shared_ptr<Communicator> comm, std::vector<RowTensor> tensors,
                                   const std::string& name)
    : GroupedRows(std::move(comm), std::move(tensors)) {
  const size_t own = header_bytes() + bytes_, gathered = own * comm_->size();
  const bool kept = gathered <= kMostKeptBytes;
  const size_t result_at = round_up(own, Memory::kAlignment);
  Part& part = parts_.emplace_back();
  part.memory = comm_->scratch(result_at + (kept ? gathered : 0));
  std::byte* const block = part.memory->data();
  size_t at = header_bytes();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t rows = tensors_[i].rows;
    const size_t bytes = rows * tensors_[i].row_bytes();
    std::memcpy(block + i * sizeof rows, &rows, sizeof rows);
    copy_bytes(block + at, tensors_[i].data, bytes);
    at += bytes;
  }
  part.request = {.kind = Kind::kAllGather,
                  .in = block,
                  .out = kept ? block + result_at : nullptr,
                  .count = own,
                  .dtype = DType::kUInt8,
                  .name = name,
                  .out_bytes = kept ? gathered : 0,
                  .skip_own = true,
                  .group = group_of(tensors_, /*with_rows=*/false)};
}

std::vector<const std::byte*> GroupedAllGather::blocks() const {
  const Operation& operation = *parts_[0].operation;
  const std::byte* at =
      operation.output != nullptr ? operation.output->data() : static_cast<const std::byte*>(operation.request.out);
  std::vector<const std::byte*> found;
  for (const int64_t bytes : operation.counts) {
    found.push_back(at);
    at += bytes;
  }
  found[comm_->rank()] = parts_[0].memory->data();
  return found;
}

const std::vector<uint64_t>& GroupedAllGather::all_rows() const {
  if (!all_rows_.empty() || tensors_.empty()) return all_rows_;
  const std::vector<const std::byte*> all = blocks();
  std::vector<uint64_t> found(all.size() * tensors_.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    uint64_t* const rows = found.data() + rank * tensors_.size();
    const uint64_t bytes = static_cast<uint64_t>(parts_[0].operation->counts[rank]);
    bool fits = bytes >= header_bytes();
    if (fits) std::memcpy(rows, all[rank], header_bytes());
    uint64_t left = fits ? bytes - header_bytes() : 0;
    for (size_t i = 0; fits && i < tensors_.size(); ++i) {
      const uint64_t row_bytes = tensors_[i].row_bytes();
      fits = row_bytes == 0 || rows[i] <= left / row_bytes;
      left -= rows[i] * row_bytes;
    }
    if (fits && left == 0) continue;
    throw TransportError("rank " + std::to_string(comm_->members().job_rank(static_cast<int>(rank))) + " sent " +
                         std::to_string(bytes) +
                         " bytes that are not the rows they are said to be: shared memory is damaged. Look for "
                         "out-of-bounds writes in that process");
  }
  return all_rows_ = std::move(found);
}

std::vector<size_t> GroupedAllGather::rows() const {
  std::vector<size_t> total(tensors_.size(), 0);
  const std::vector<uint64_t>& all = all_rows();
  for (size_t i = 0; i < all.size(); ++i) total[i % total.size()] += all[i];
  return total;
}

void GroupedAllGather::unpack(const std::vector<void*>& results) const {
  std::vector<std::byte*> to;
  for (void* result : results) to.push_back(static_cast<std::byte*>(result));
  const uint64_t* rows = all_rows().data();
  for (const std::byte* block : blocks()) {
    const std::byte* from = block + header_bytes();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const size_t bytes = *rows++ * tensors_[i].row_bytes();
      copy_bytes(to[i], from, bytes);
      to[i] += bytes;
      from += bytes;
    }
  }
}

GroupedReduceScatter::GroupedReduceScatter(std::shared_ptr<Communicator> comm, std::vector<RowTensor> tensors,
                                           const Call& options)
    : GroupedRows(std::move(comm), std::move(tensors)) {
  const std::string group = group_of(tensors_, /*with_rows=*/true);
  const auto has_part = [&](DType dtype) {
    return std::any_of(parts_.begin(), parts_.end(), [&](const Part& p) { return p.request.dtype == dtype; });
  };
  for (const RowTensor& tensor : tensors_) {
    if (!has_part(tensor.dtype)) pack_part(tensor.dtype, options, group);
  }
}

// Block by block: what rank 0 gets of every tensor, what rank 1 gets, ... and behind them room for this rank's result.
void GroupedReduceScatter::pack_part(DType dtype, const Call& options, const std::string& group) {
  std::vector<size_t> splits;
  std::vector<kernels::Segment> segments;
  size_t at = 0;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const size_t begin = at;
    for (const RowTensor& tensor : tensors_) {
      if (tensor.dtype != dtype) continue;
      const ChunkRange share = Layout::even(tensor.rows, comm_->size()).chunk(rank);
      auto* data = static_cast<std::byte*>(const_cast<void*>(tensor.data)) + share.begin * tensor.row_bytes();
      segments.push_back({data, at, share.len * tensor.row_bytes()});
      at += share.len * tensor.row_bytes();
    }
    splits.push_back((at - begin) / dtype_bytes(dtype));
  }
  Part& part = parts_.emplace_back();
  const size_t result_at = round_up(at, Memory::kAlignment);
  part.memory = comm_->scratch(result_at + splits[comm_->rank()] * dtype_bytes(dtype));
  kernels::pack(part.memory->data(), segments);
  part.request = {.kind = Kind::kReduceScatter,
                  .in = part.memory->data(),
                  .out = part.memory->data() + result_at,
                  .count = at / dtype_bytes(dtype),
                  .dtype = dtype,
                  .op = options.op,
                  .prescale = options.prescale,
                  .postscale = options.postscale,
                  .name = std::string(options.name),
                  .splits = std::move(splits),
                  .group = group};
}

std::vector<size_t> GroupedReduceScatter::rows() const {
  std::vector<size_t> shares;
  for (const RowTensor& tensor : tensors_) {
    shares.push_back(Layout::even(tensor.rows, comm_->size()).chunk(comm_->rank()).len);
  }
  return shares;
}

void GroupedReduceScatter::unpack(const std::vector<void*>& results) const {
  const std::vector<size_t> shares = rows();
  for (const Part& part : parts_) {
    const auto* from = static_cast<const std::byte*>(part.request.out);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].dtype != part.request.dtype) continue;
      const size_t bytes = shares[i] * tensors_[i].row_bytes();
      copy_bytes(results[i], from, bytes);
      from += bytes;
    }
  }
}

}  // namespace dcoll
