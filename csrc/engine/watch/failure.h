// How a failure travels: as text, whose first letter tells the class, so that every rank raises the same one.
#pragma once

#include <exception>
#include <string>

namespace dcoll {

std::string encode_failure(std::exception_ptr error, int rank);
std::exception_ptr decode_failure(const std::string& notice);
std::string failure_text(std::exception_ptr error);

}  // namespace dcoll
