// A C face of Intel oneCCL's CPU all-reduce, for ctypes. Compiled by the benchmark against the wheel `oneccl-devel`.
#include <cstring>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>
#include <string>

namespace {

std::string error;
std::shared_ptr<ccl::kvs> store;
std::unique_ptr<ccl::communicator> comm;

template <typename F>
int guarded(F body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    error = e.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* peer_error() { return error.c_str(); }

const char* peer_version() {
  static std::string text;
  auto version = ccl::get_library_version();
  text = std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.update);
  return text.c_str();
}

// Rank 0: where the others find the rendezvous, 256 bytes.
int peer_address(char* address) {
  return guarded([&] {
    ccl::init();
    store = ccl::create_main_kvs();
    auto bytes = store->get_address();
    std::memcpy(address, bytes.data(), bytes.size());
  });
}

int peer_join(int size, int rank, const char* address) {
  return guarded([&] {
    if (!store) {
      ccl::init();
      ccl::kvs::address_type bytes;
      std::memcpy(bytes.data(), address, bytes.size());
      store = ccl::create_kvs(bytes);
    }
    comm = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
  });
}

int peer_all_reduce(void* buffer, size_t count, int dtype) {
  return guarded([&] {
    ccl::allreduce(buffer, buffer, count, static_cast<ccl::datatype>(dtype), ccl::reduction::sum, *comm).wait();
  });
}

void peer_leave() {
  comm.reset();
  store.reset();
}
}
