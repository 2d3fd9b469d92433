// What is logged while something runs: all of it goes to standard error.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

namespace dcoll::test {

// What `body`, with all threads it starts, says there. They must have ended with it, or be silent from then on.
inline std::string said_in(const std::function<void()>& body) {
  struct Instead {
    char* text = nullptr;
    size_t length = 0;
    FILE* const before = std::exchange(stderr, open_memstream(&text, &length));
    ~Instead() {
      std::fclose(std::exchange(stderr, before));
      std::free(text);
    }
  };
  Instead instead;
  body();
  std::fflush(stderr);
  return {instead.text, instead.length};
}

inline size_t times_in(const std::string& text, const std::string& part) {
  size_t times = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++times;
  return times;
}

}  // namespace dcoll::test
