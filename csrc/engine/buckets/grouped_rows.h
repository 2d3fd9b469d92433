// All-gather and reduce-scatter of many tensors as one: packed into one block which peers can read, and unpacked once
// all of it has succeeded. Results are those of one operation per tensor.
//
//   all-gather       One operation for all dtypes: a rank's block is the number of rows of each of its tensors, in
//                    which ranks may differ, and then their bytes.
//   reduce-scatter   One operation per dtype: the block for rank r is the rows of all tensors that rank r gets.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "engine/communicator/communicator.h"
#include "kernels/pack.h"

namespace dcoll {

struct RowTensor {
  const void* data = nullptr;
  size_t rows = 0;
  size_t row_elems = 0;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> row_dims{};  // {}: one dimension or none
  size_t row_bytes() const { return row_elems * dtype_bytes(dtype); }
};

size_t bytes_of(const std::vector<RowTensor>& tensors);

// Not thread-safe: called by one thread at a time. The tensors are read by the constructor and by nothing else.
class GroupedRows {
 public:
  using Wait = std::function<void(Operation&)>;
  virtual ~GroupedRows() = default;

  // Once, or run(). By name: to meet the group of that name on the other ranks (named_lane.h).
  void start(bool by_name);
  // Runs on this thread where possible; `wait` waits for what is not done then.
  void run(const Wait& wait);

  bool done() const;
  // Until all is done. Throws the first failure.
  void finish(const Wait& wait);

  // Once finished: how many rows each result has; and the results, one after the other, into memory of that size.
  virtual std::vector<size_t> rows() const = 0;
  virtual void unpack(const std::vector<void*>& results) const = 0;
  size_t bytes() const { return bytes_; }  // of this rank's tensors

 protected:
  struct Part {
    Request request;
    std::shared_ptr<Memory> memory;
    std::shared_ptr<Operation> operation;
  };

  GroupedRows(std::shared_ptr<Communicator> comm, std::vector<RowTensor> tensors);

  const std::shared_ptr<Communicator> comm_;
  const std::vector<RowTensor> tensors_;
  std::vector<Part> parts_;
  const size_t bytes_;

 private:
  void validate() const;
};

class GroupedAllGather final : public GroupedRows {
 public:
  GroupedAllGather(std::shared_ptr<Communicator> comm, std::vector<RowTensor> tensors, const std::string& name);
  std::vector<size_t> rows() const override;
  void unpack(const std::vector<void*>& results) const override;

 private:
  size_t header_bytes() const { return tensors_.size() * sizeof(uint64_t); }
  // What each rank contributed.
  std::vector<const std::byte*> blocks() const;
  // By rank and tensor, as the blocks say.
  const std::vector<uint64_t>& all_rows() const;

  mutable std::vector<uint64_t> all_rows_;  // read once, as peers can reach the memory that they are in
};

class GroupedReduceScatter final : public GroupedRows {
 public:
  // options: operator, factors and name of the whole; the rest is not looked at.
  GroupedReduceScatter(std::shared_ptr<Communicator> comm, std::vector<RowTensor> tensors, const Call& options);
  std::vector<size_t> rows() const override;
  void unpack(const std::vector<void*>& results) const override;

 private:
  void pack_part(DType dtype, const Call& options, const std::string& group);
};

}  // namespace dcoll
