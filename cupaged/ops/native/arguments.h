// What Python gives to a function of the module, and the sizes of it.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <cstdarg>
#include <cstdint>
#include <initializer_list>

// No size is larger, so that what two of them make can be multiplied once more by a float's bytes.
constexpr std::int64_t kLargest = std::int64_t{1} << 30;

// A product of sizes, or what no array has if it is larger than that.
inline std::int64_t times(std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return INT64_MAX;
  }
  return product;
}

// The arguments of a call, taken one by one; the first failure stands, as a Python exception.
class Arguments {
 public:
  Arguments(const char* function, PyObject* const* values, Py_ssize_t given, int expected)
      : function_(function), values_(values) {
    if (given != expected) {
      fail("takes %d arguments, got %lld", expected, static_cast<long long>(given));
    }
  }
  ~Arguments() {
    for (int i = 0; i < num_views_; ++i) PyBuffer_Release(&views_[i]);
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  bool ok() const { return ok_; }

  // An array, of exactly `num_bytes` if that is not negative, where a None is allowed or not.
  template <class T>
  T* array(const char* name, std::int64_t num_bytes, bool writable, bool optional = false) {
    if (!ok_) return nullptr;
    PyObject* value = *values_++;
    length_ = 0;
    if (optional && value == Py_None) return nullptr;
    Py_buffer& view = views_[num_views_];
    if (PyObject_GetBuffer(value, &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
      ok_ = false;
      return nullptr;
    }
    ++num_views_;
    length_ = view.len;
    if (num_bytes >= 0 && view.len != num_bytes) {
      fail("%s has %lld bytes, must have %lld", name, static_cast<long long>(view.len),
           static_cast<long long>(num_bytes));
    }
    if (reinterpret_cast<std::uintptr_t>(view.buf) % alignof(T) != 0) {
      fail("%s is not aligned to %d bytes", name, static_cast<int>(alignof(T)));
    }
    return static_cast<T*>(view.buf);
  }

  std::int64_t length() const { return length_; }  // in bytes, of the last array

  std::int64_t integer(const char* name, std::int64_t least, std::int64_t most = kLargest) {
    if (!ok_) return least;
    const long long value = PyLong_AsLongLong(*values_++);
    if (value == -1 && PyErr_Occurred() != nullptr) {
      ok_ = false;
    } else if (value < least) {
      fail("%s is %lld, must be at least %lld", name, value, static_cast<long long>(least));
    } else if (value > most) {
      fail("%s is %lld, must be at most %lld", name, value, static_cast<long long>(most));
    }
    return ok_ ? value : least;
  }

  float real() {
    if (!ok_) return 0.0f;
    const double value = PyFloat_AsDouble(*values_++);
    if (value == -1.0 && PyErr_Occurred() != nullptr) ok_ = false;
    return static_cast<float>(value);
  }

  // To be called with what the arguments must be to each other.
  void require(bool condition, const char* what) {
    if (ok_ && !condition) fail("%s", what);
  }

  void fail(const char* format, ...) {
    if (!ok_) return;
    ok_ = false;
    va_list values;
    va_start(values, format);
    PyObject* text = PyUnicode_FromFormatV(format, values);
    va_end(values);
    if (text == nullptr) return;
    PyErr_Format(PyExc_ValueError, "%s: %U", function_, text);
    Py_DECREF(text);
  }

 private:
  const char* function_;
  PyObject* const* values_;
  Py_buffer views_[9];
  int num_views_ = 0;
  std::int64_t length_ = 0;
  bool ok_ = true;
};
