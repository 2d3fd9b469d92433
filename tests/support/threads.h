// Ranks as threads: on_threads(n, body) calls body(rank) on n threads and rethrows the first failure of the lowest
// rank.
#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace dcoll::test {

inline void on_threads(int n, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace dcoll::test
