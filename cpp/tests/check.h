// The little that these tests need: named cases, checks that say where they failed, a count at the end.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "paceline/base/error.h"

namespace test {

struct Case {
  const char* name;
  std::function<void()> run;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> run) { cases().push_back({name, std::move(run)}); }
};

struct Failure {
  std::string what;
};

inline int run_all() {
  int failed = 0;
  for (auto& c : cases()) {
    try {
      c.run();
    } catch (const Failure& f) {
      std::printf("FAILED %s: %s\n", c.name, f.what.c_str());
      ++failed;
    } catch (const std::exception& e) {
      std::printf("FAILED %s: unexpected exception: %s\n", c.name, e.what());
      ++failed;
    }
  }
  std::printf("%zu passed, %d failed\n", cases().size() - size_t(failed), failed);
  return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

// The error that f throws, as its kind; fails when it throws none.
template <class F>
paceline::Error error_of(F f) {
  try {
    f();
  } catch (const paceline::Error& e) {
    return e;
  }
  throw Failure{"expected an error"};
}

}  // namespace test

#define TEST(name)                                    \
  static void name();                                 \
  static test::Register register_##name(#name, name); \
  static void name()
#define CHECK(condition)                                                                                             \
  do {                                                                                                               \
    if (!(condition)) throw test::Failure{std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition}; \
  } while (0)
