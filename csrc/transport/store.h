// A job's start over a key-value store, such as torch's TCPStore, and nothing else: no MPI.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/bootstrap.h"

namespace dcoll {

// The store, the same for all ranks. Keys are written once. Both may throw, which ends what is under way.
struct KeyValueStore {
  std::function<void(const std::string& key, const std::vector<std::byte>& value)> set;
  // Does not wait: none where the key is not there yet.
  std::function<std::optional<std::vector<std::byte>>(const std::string& key)> get;
};

// Tells the store that this process is here. ArgumentError for a rank that does not exist.
std::unique_ptr<Bootstrap> make_store_bootstrap(int rank, int size, KeyValueStore store);

}  // namespace dcoll
