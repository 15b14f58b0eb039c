// Clusters: barriers of blocks that run together, and distributed shared memory (PTX ISA, "barrier.cluster", "mapa").
#pragma once
#include "warpgroups.h"

namespace {

Waiters cluster_waiters;
unsigned cluster_arrived;

void complete_cluster() {  // threads that have ended count as arrived
  if (!cluster_arrived || cluster_arrived + finished < all_threads()) return;
  cluster_arrived = 0;
  order_cluster();
  publish_cluster_barriers();
  wake(cluster_waiters);
}

void end_block(Block &block) {
  end_flights(block);
  end_barriers(block);
  const unsigned char *end = launch->dynamic ? dynamic_of(block.rank) + launch->dynamic_bytes : nullptr;
  if (end && !poisoned(end, end + emulator::DYNAMIC_SLACK_BYTES))
    report(FAULT, "the block wrote behind dynamic shared memory, of which the launch asked for %lu bytes",
           launch->dynamic_bytes);
  if (block_count > 1) open_shared(block.rank, false);
  complete_cluster();
}

void begin_clustered(uint64_t first) {
  cluster_waiters = {};
  cluster_arrived = 0;
  assign_shared();
  begin_barriers();
  begin_events();
  flight_count = 0;
  drop_tracked();
  for (unsigned rank = 0; rank < block_count; rank++) {
    uint64_t i = first + rank;
    blocks[rank].position = {unsigned(i % gridDim.x), unsigned(i / gridDim.x % gridDim.y),
                          unsigned(i / gridDim.x / gridDim.y)};
    blocks[rank].rank = rank;
    begin_warpgroups(rank);
    memset(shared_of[rank], POISON, shared.bytes);
  }
}

// Check that a block's shared memory is accessible: the cluster has synchronised, and the block has not ended.
void check_rank(unsigned rank, int line) {
  if (rank >= block_count) report(FAULT, "line %d: block %u of a cluster of %u", line, rank, block_count);
  if (rank != running && cluster_sync_time == cluster_began)
    report(FAULT, "line %d: accesses block %u before the cluster has synchronised", line, rank);
  if (blocks[rank].finished == threads) report(FAULT, "line %d: accesses block %u, which has ended", line, rank);
}

}  // namespace

void emulator::cluster_sync(int line) {
  rendezvous_warp("cluster_sync", line);
  cluster_arrived++;
  current->line = line;
  current->next = cluster_waiters.first;
  cluster_waiters.first = current;
  complete_cluster();
  yield();
}

unsigned int cluster_rank() { return running; }

void *emulator::map_shared_rank(void *own, unsigned int rank, int line) {
  if (!in_shared(own, 1)) report(FAULT, "line %d: an address outside the block's shared memory", line);
  check_rank(rank, line);
  return shared_at(shared_offset(own, running), rank);
}

void emulator::barrier_arrive_remote(void *at, unsigned int rank, int line) {
  size_t offset = offset_of_barrier(at, line);
  check_rank(rank, line);
  arrive(barrier_of(offset, rank, line), 0, line);
}

void *emulator::own_shared(void *first) {
  return shared_of[running] + (static_cast<unsigned char *>(first) - shared.at);
}

unsigned int shared_address(const void *at) {
  if (!in_shared(at, 1)) return ~0u;
  return static_cast<unsigned>(shared_offset(at, running));
}
