// The test harness of the C++ tests: TEST(name) { ... CHECK(...); } and one main per binary. Small, so that the core's
// tests need nothing installed. Exit status 0 only if every test ran and none failed; a binary with no tests fails.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Sanitizers make code 5 to 15 times slower: tests that try every combination try fewer there.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

namespace dcoll::test {

struct Case {
  const char* name;
  std::function<void()> body;
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  Register(const char* name, std::function<void()> body) { cases().push_back({name, std::move(body)}); }
};
[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}
template <class A, class B>
std::string show(const char* expression, const A& a, const B& b) {
  std::ostringstream out;
  out << expression << " (got " << +a << ", want " << +b << ")";
  return out.str();
}
template <>
inline std::string show(const char* expression, const std::string& a, const std::string& b) {
  return std::string(expression) + " (got \"" + a + "\", want \"" + b + "\")";
}
// What random numbers of this run begin from: another one each time, printed, and given back by TESTS_SEED. A seed that
// found something is kept: as a case of its own beside the moving one.
inline unsigned seed() {
  static const unsigned chosen = [] {
    const char* given = std::getenv("TESTS_SEED");
    const auto found =
        given ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}() % 1000000;
    std::printf("seed %u: TESTS_SEED=%u draws the same again\n", found, found);
    return found;
  }();
  return chosen;
}
// Said before a test is left out, or cut short, because something is missing here: an error where TESTS_NEED, a list
// separated by commas, names it.
inline void lacks(const std::string& what, const std::string& reason) {
  const char* given = std::getenv("TESTS_NEED");
  std::string needed = ",";
  needed += given ? given : "";
  needed += ",";
  if (needed.find(',' + what + ',') != std::string::npos || needed.find(",all,") != std::string::npos) {
    throw std::runtime_error("TESTS_NEED=" + std::string(given) + ", but: " + reason);
  }
  std::printf("skip %s: %s\n", what.c_str(), reason.c_str());
}
// Runs the tests whose name contains argv[1] (all without it).
inline int run(int argc, char** argv) {
  int ran = 0, failed = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && !std::strstr(c.name, argv[1])) continue;
    ++ran;
    try {
      c.body();
      std::printf("ok   %s\n", c.name);
    } catch (const std::exception& e) {
      ++failed;
      std::printf("FAIL %s: %s\n", c.name, e.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", ran - failed, failed);
  return ran > 0 && failed == 0 ? 0 : 1;
}

}  // namespace dcoll::test

#define TEST(name)                                                    \
  static void test_##name();                                          \
  static ::dcoll::test::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) ::dcoll::test::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define CHECK_EQ(a, b)                                                                                       \
  do {                                                                                                       \
    const auto va_ = (a);                                                                                    \
    const auto vb_ = (b);                                                                                    \
    if (!(va_ == vb_)) ::dcoll::test::fail(__FILE__, __LINE__, ::dcoll::test::show(#a " == " #b, va_, vb_)); \
  } while (0)
// The expression throws Exception, and its message contains `text`.
#define CHECK_THROWS(expression, Exception, text)                                                               \
  do {                                                                                                          \
    bool thrown_ = false;                                                                                       \
    try {                                                                                                       \
      (void)(expression);                                                                                       \
    } catch (const Exception& e_) {                                                                             \
      thrown_ = true;                                                                                           \
      if (std::string(e_.what()).find(text) == std::string::npos)                                               \
        ::dcoll::test::fail(__FILE__, __LINE__, std::string("message lacks \"") + (text) + "\": " + e_.what()); \
    }                                                                                                           \
    if (!thrown_) ::dcoll::test::fail(__FILE__, __LINE__, #expression " did not throw " #Exception);            \
  } while (0)
#define TEST_MAIN \
  int main(int argc, char** argv) { return ::dcoll::test::run(argc, argv); }
