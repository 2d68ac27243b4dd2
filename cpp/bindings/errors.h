#pragma once
#include <nanobind/nanobind.h>

#include "paceline/base/error.h"

namespace paceline {

nanobind::object text_of(const std::exception& error);
nanobind::object to_python(const Error& error);
void register_errors();

}  // namespace paceline
