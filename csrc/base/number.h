// Numbers in text, read and written alike in every locale: setlocale(LC_NUMERIC, "de_DE") in the program changes what
// strtod and printf take for the decimal point.
#pragma once

#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>

namespace dcoll {

// Of a text that is one finite number from its first character to its last.
inline std::optional<double> number_from(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

// As printf's %.<digits>g writes it in the C locale; 17 digits are read back as the same number.
inline std::string text_of(double value, int digits) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::general, digits).ptr};
}

}  // namespace dcoll
