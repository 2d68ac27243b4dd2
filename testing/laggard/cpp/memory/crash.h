// What a crash says: a touch of closed memory ends the process, after a line that names the mistake.
#pragma once

namespace laggard {

// Put the handler of SIGSEGV before the one that is installed now (faulthandler's prints the Python line).
void explain_crashes();

}  // namespace laggard
