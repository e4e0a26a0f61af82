#include "streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <signal.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "memory.h"

namespace card {

// Marks and queues ----------------------------------------------------------------------------------------------------

void Mark::set() {
  {
    std::lock_guard lock(guard_);
    done_ = true;
    time_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

bool Mark::query() {
  std::lock_guard lock(guard_);
  return done_;
}

void Mark::wait() {
  std::unique_lock lock(guard_);
  changed_.wait(lock, [&] { return done_; });
}

std::chrono::steady_clock::time_point Mark::time() {
  std::lock_guard lock(guard_);
  TORCH_CHECK(done_, "card: the event has not happened yet");
  return time_;
}

void Queue::push(std::function<void()> job) {
  std::lock_guard lock(guard_);
  if (!started_) {
    started_ = true;
    sigset_t all, before;  // signals are for the threads of Python
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  jobs_.push_back(std::move(job));
  work_.notify_one();
}

MarkPtr Queue::mark() {
  auto mark = std::make_shared<Mark>();
  push([mark] { mark->set(); });
  return mark;
}

bool Queue::idle() {
  std::lock_guard lock(guard_);
  return is_idle();
}

void Queue::drain() {
  std::unique_lock lock(guard_);
  idle_.wait(lock, [&] { return is_idle(); });
}

void Queue::run() {
  std::unique_lock lock(guard_);
  while (true) {
    work_.wait(lock, [&] { return !jobs_.empty(); });
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    try {
      job();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "card: a job of a stream failed: %s\n", error.what());
      std::abort();
    }
    job = nullptr;
    lock.lock();
    busy_ = false;
    if (jobs_.empty()) idle_.notify_all();
  }
}

// The current device and its current stream, of each thread -----------------------------------------------------------

namespace {

using Queues = std::array<std::array<Queue, NUM_STREAMS>, NUM_DEVICES>;

Queues& queues() {
  static auto* queues = new Queues();  // never ends: its threads may outlive main
  return *queues;
}

thread_local int device_here = 0;
thread_local std::array<c10::StreamId, NUM_DEVICES> streams_here = {};
std::array<std::atomic<int>, NUM_DEVICES> lent;  // streams of the pool
std::array<std::atomic<int64_t>, NUM_DEVICES> touches;
std::atomic<bool> is_available{true};

c10::Stream stream_of(int device, c10::StreamId stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), stream);
}

}  // namespace

Queue& queue(int device, c10::StreamId stream) {
  return queues().at(device).at(stream);
}
c10::StreamId current_stream(int device) { return streams_here.at(device); }
Queue& current_queue(int device) {
  touch(device);
  return queue(device, current_stream(device));
}
int current_device() { return device_here; }
int index_of(c10::Device device) { return device.index() < 0 ? device_here : device.index(); }
bool available() { return is_available; }
void set_available(bool available) { is_available = available; }
void touch(int device) { touches.at(device)++; }
int64_t take_touches(int device) { return touches.at(device).exchange(0); }

void set_device(int device) {
  TORCH_CHECK(device < NUM_DEVICES, "card: there is no device ", device);
  if (device < 0) return;
  device_here = device;
  touch(device);
}

// What torch asks of a device's streams and events ---------------------------------------------------------------------

namespace {

MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device != before) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, device_here); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_here = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    int index = index_of(device);
    return stream_of(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    int index = index_of(device);
    return stream_of(index, 1 + lent.at(index)++ % (NUM_STREAMS - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& here = streams_here.at(stream.device_index());
    auto before = stream_of(stream.device_index(), here);
    here = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue(stream.device_index(), stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override { return queue(stream.device_index(), stream.id()).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue(stream.device_index(), stream.id()).drain(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    touch(index_of(c10::Device(TYPE, device)));
    for (auto& queue : queues().at(device < 0 ? device_here : device)) queue.drain();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr();
    mark_of(*event) = queue(stream.device_index(), stream.id()).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    queue(stream.device_index(), stream.id()).push([mark = mark_of(event)] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || mark_of(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) mark_of(event)->wait();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> found = mark_of(second)->time() - mark_of(first)->time();
    return static_cast<float>(found.count());  // CUDA gives a float
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }

  // Whether or not it is available: autograd counts once in a process, at its first backward, and has no threads for
  // more devices.
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    memory().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace card
