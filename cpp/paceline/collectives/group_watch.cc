// The checks of a group a few times a second while it waits: dead and stopped peers, deadlines, warnings, heartbeats.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "paceline/base/error.h"
#include "paceline/collectives/group.h"

namespace paceline {
namespace {
constexpr double kHeartbeat_s = 0.25;
constexpr size_t kNamed = 8;  // ranks that a message names
}  // namespace

std::string Group::peer_name(int rank) {
  auto link = engine_->link(rank);
  return "rank " + std::to_string(rank) + (link ? " (pid " + std::to_string(link->pid()) + ")" : "");
}

void Group::check_waiting(Operation& operation, Lane lane, double now) {
  Wait* wait = operation.fiber().wait;
  std::vector<int> ranks;
  if (wait && !wait->ready()) wait->blockers(ranks);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  for (int rank : ranks) require_alive(rank, operation, lane, now);
  if (std::isinf(config_.timeout_s)) return;
  std::string on;
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); ++i) on += (on.empty() ? "" : ", ") + peer_name(ranks[i]);
  if (ranks.size() > kNamed) on += " and " + std::to_string(ranks.size() - kNamed) + " others";
  const EngineConfig& limits = engine_->config();
  double age = operation.age_s();
  if (age > config_.timeout_s)
    throw Error(ErrorKind::peer_timeout,
                operation.describe() + " hit its timeout after " + std::to_string(int(age)) + " s: rank " +
                    std::to_string(limits.rank) + " waits for " + on +
                    ", which may be busy or stuck elsewhere. Raise the timeout (PACELINE_TIMEOUT_S, or the one given "
                    "to the group) if this is expected.",
                ranks.empty() ? -1 : ranks[0]);
  if (age > limits.warn_s && !ranks.empty()) engine_->note_long_wait({operation.describe(), age, ranks});
  if (operation.next_warning_s == 0) operation.next_warning_s = limits.warn_s;
  if (age > operation.next_warning_s && !on.empty()) {
    operation.next_warning_s *= 3;
    fprintf(stderr, "paceline: rank %d: %s has waited %.0f s for %s\n", limits.rank, operation.describe().c_str(), age,
            on.c_str());
  }
}

// Throws if the operation waits for a rank that can no longer do its part. All members get the same message, so it names
// the rank that noticed. A rank that has finished closes all of its lanes at once: only the end of the lane that the
// operation uses counts, because what the rank sent there before may not have arrived yet.
void Group::require_alive(int rank, const Operation& operation, Lane lane, double now) {
  const EngineConfig& limits = engine_->config();
  auto link = engine_->link(rank);
  bool is_neighbour = is_local(member_of(rank));
  bool lost = is_neighbour && (!link || link->lost());  // without a link it has been forgotten
  double silent = link ? link->silent_s(now) : 0;
  for (auto& [key, port] : ports_)
    if (port->peer() == rank) {
      lost |= key.second == lane && port->lost();
      // A neighbour's heartbeat is in shared memory; its ports are silent while it has nothing to send. A rank that has
      // never sent anything may still be in its last step with another group: the coordinator watches it.
      if (!is_neighbour && port->is_open() && port->has_heard())
        silent = std::max(silent, now - std::max(port->heard_s(), now - operation.age_s()));
    }
  std::string noticed = " during " + operation.describe() + " (noticed by rank " + std::to_string(limits.rank) + "). ";
  // What the rank did before its end counts: check once more.
  Wait* wait = operation.fiber().wait;
  if (lost && (!wait || !wait->ready()))
    throw Error(ErrorKind::peer_lost,
                peer_name(rank) +
                    (link && link->left() ? " has finished and left the job" : " ended or lost its connection") +
                    noticed + "Check the output of that rank; the group cannot continue without it.",
                rank);
  if (silent > limits.limit_s(is_neighbour))
    throw Error(
        ErrorKind::peer_timeout,
        peer_name(rank) + (is_neighbour ? " has not run for " : " has not been heard for ") +
            std::to_string(int(silent)) + " s" + noticed +
            (is_neighbour ? "Its process is stopped: continue it, or raise PACELINE_LIVENESS_S."
                          : "Its process or its machine is stopped, or the network to it is cut: check both, or "
                            "raise PACELINE_LIVENESS_S."),
        rank);
}

void Group::inspect(double now) {
  if (failure_) return;
  try {
    if (team_)
      if (auto failure = team_->published_failure()) std::rethrow_exception(failure);
    if (!collectives_.empty()) check_waiting(*collectives_.front(), Lane::collective, now);
    for (auto& transfer : transfers_) check_waiting(*transfer, Lane::point_to_point, now);
  } catch (const std::exception&) {
    fail_now(std::current_exception());
  }
}

// A rank that computes for a minute has no operation pending, but its peers on other hosts still need its heartbeat.
void Group::beat(double now) {
  // Several times within the limit: one late heartbeat must not look like a stopped process.
  if (now - beat_s_ < std::min(kHeartbeat_s, engine_->config().limit_s(false) / 4)) return;
  beat_s_ = now;
  if (failure_) {  // only the notice of the failure may still have to be sent, also to members that connect now
    take_inbox();
    for (auto& [key, port] : ports_) port->flush();
    return;
  }
  for (auto& [key, port] : ports_) {
    if (is_local(key.first)) continue;
    port->heartbeat();
    port->flush();
  }
}

void Group::close_after_fork() {
  for (auto& [key, port] : ports_) port->close_after_fork();
}

}  // namespace paceline
