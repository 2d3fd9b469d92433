// The test harness of the C++ tests: TEST(name) { ... CHECK(...); } and one main per binary. Small, so that the core's
// tests need nothing installed. Exit status 0 only if every test ran and none failed; a binary with no tests fails.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
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
