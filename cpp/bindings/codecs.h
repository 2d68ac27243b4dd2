#pragma once
#include <nanobind/nanobind.h>

namespace paceline {

void register_codecs(nanobind::module_& m);

}  // namespace paceline
