// Streams of the card: each is a queue with a thread that runs what is launched on it, in order.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace card {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 2;
constexpr int NUM_STREAMS = 33;  // of a device: the default one, and a pool that is lent round and round

// One recording of an event: whether its stream has come to it, and when.
class Mark {
 public:
  void set();
  bool query();
  void wait();
  std::chrono::steady_clock::time_point time();

 private:
  std::mutex guard_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point time_{};
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  // A job holds addresses and numbers alone: no tensor may end on a stream's thread.
  void push(std::function<void()> job);
  MarkPtr mark();
  bool idle();
  void drain();

 private:
  void run();
  bool is_idle() const { return jobs_.empty() && !busy_; }

  std::mutex guard_;
  std::condition_variable work_, idle_;
  std::deque<std::function<void()>> jobs_;
  bool busy_ = false, started_ = false;
};

Queue& queue(int device, c10::StreamId stream);
Queue& current_queue(int device);
c10::StreamId current_stream(int device);

int current_device();
void set_device(int device);
int index_of(c10::Device device);  // of the current one where it has none
bool available();                  // whether torch sees the card: other tests of a process do without it
void set_available(bool available);

// The threads that have launched, allocated or stood on a device since the last call: on CUDA that makes a context.
void touch(int device);
int64_t take_touches(int device);

}  // namespace card
