"""Rows 29, 30 and 32: numbers that are wrong on one worker, and clocks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from story import Story

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Worker 1 lives an hour ahead, worker 2 an hour behind; every two seconds they change places. */
static long offset(void) {
  const char* rank = getenv("PACELINE_RANK");
  struct timespec now;
  int (*real)(clockid_t, struct timespec*) = dlsym(RTLD_NEXT, "clock_gettime");
  if (!rank || (strcmp(rank, "1") && strcmp(rank, "2"))) return 0;
  real(CLOCK_MONOTONIC, &now);
  return (((now.tv_sec / 2) % 2) ^ (rank[0] == '1')) ? 3600 : -3600;
}
int clock_gettime(clockid_t which, struct timespec* t) {
  int (*real)(clockid_t, struct timespec*) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(which, t);
  if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) t->tv_sec += offset();
  return code;
}
int gettimeofday(struct timeval* t, void* zone) {
  int (*real)(struct timeval*, void*) = dlsym(RTLD_NEXT, "gettimeofday");
  int code = real(t, zone);
  t->tv_sec += offset();
  return code;
}
time_t time(time_t* out) {
  struct timeval t;
  gettimeofday(&t, 0);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
"""


def test_row_29_one_worker_computes_nan(story: Story) -> None:
    story.start("-n", "3", nonfinite="raise")
    story.wait_for_step(10)
    story.tell(1, "poison")
    story.expect_detection(r"NonFiniteGradient: step \d+: .*rank 1: 0\.weight", within_s=5)
    story.expect_end(1)
    story.expect_agreement()  # nobody took the poisoned step


@pytest.mark.slow
def test_row_29_or_leaves_that_step_out(story: Story) -> None:
    story.start("-n", "3", nonfinite="skip")
    story.wait_for_step(10)
    story.tell(1, "poison")
    story.expect_detection(r"step \d+: a gradient is NaN .*rank 1: 0\.weight.*left out", 5)
    story.expect_success()
    story.expect_agreement()


@pytest.mark.slow
def test_row_30_a_bit_flips_in_one_replica(story: Story) -> None:
    story.start("-n", "3", "--pace", "allreduce[update=replicated]", check=5)
    story.wait_for_step(10)
    story.tell(2, "flip")
    story.expect_detection(r"ranks 0, 1 against rank 2 .*at flat index 0", within_s=10)
    story.expect_end(1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-s", "1", "--pace", "ps")], ids=["allreduce", "ps"])
def test_row_32_clocks_go_wrong(story: Story, tmp_path: Path, options: tuple[str, ...]) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the wrong clock")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    story.start("-n", "3", *options, env={"LD_PRELOAD": str(library)}, pause=0.04)
    story.wait_for_step(10)
    story.happens()
    story.expect_resume(within_s=2)
    story.expect_success()
    story.expect_agreement()
    story.expect_no_line("lost|silent|stopped|evict")
