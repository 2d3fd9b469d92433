// Horovod's environment variables: which DCOLL_* setting each becomes where that one is not set, and why the others are
// no longer needed. A job script that exports them works unchanged.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace dcoll {

struct HorovodSetting {
  std::string_view variable;  // "HOROVOD_FUSION_THRESHOLD"
  std::string_view setting;   // "DCOLL_BUCKET_MB"; empty: none
  std::string_view instead;   // empty `setting`: why none is needed
};

// Every variable that Horovod 0.28 documents or its launcher sets. test_layout.py keeps docs/migration.md complete.
std::span<const HorovodSetting> horovod_settings();

struct FromHorovod {
  std::string variable;
  std::string value;  // in the words of the DCOLL_* setting
};
// What Horovod's variables in the environment say about a DCOLL_* setting.
std::optional<FromHorovod> from_horovod(std::string_view setting);

}  // namespace dcoll
