// Whole lines to stderr: lines of log_line() only with RGPU_SHIM_LOG, lines of log_once() always.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string_view>

#include "core.hpp"

namespace rgpu {
namespace {

void write_line(const char* format, std::va_list arguments) {
  char line[1024];
  int n = std::snprintf(line, sizeof line, "rgpu[%d]: ", static_cast<int>(::getpid()));
  int m = std::vsnprintf(line + n, sizeof line - static_cast<std::size_t>(n) - 1, format, arguments);
  if (m < 0) return;
  std::size_t length = std::min<std::size_t>(static_cast<std::size_t>(n + m), sizeof line - 2);
  line[length++] = '\n';
  // One write: lines of several threads and processes do not mix.
  [[maybe_unused]] ssize_t ignored = ::write(STDERR_FILENO, line, length);
}

}  // namespace

void log_line(const char* format, ...) {
  static const bool wanted = [] {
    const char* value = std::getenv("RGPU_SHIM_LOG");
    return value && *value && std::string(value) != "0";
  }();
  if (!wanted) return;
  std::va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

void log_once(const std::string& key, const char* format, ...) {
  static std::mutex lock;
  static auto* said = new std::set<std::string>;  // never destroyed: static destructors may call CUDA
  {
    std::lock_guard guard(lock);
    if (!said->insert(key).second) return;
  }
  std::va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

void log_unsupported(const char* name) {
  report_unsupported(name);
  log_once(std::string("unsupported ") + name, "%s is not supported: it returns CUDA_ERROR_NOT_SUPPORTED", name);
}

}  // namespace rgpu
