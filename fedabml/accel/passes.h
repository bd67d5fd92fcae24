/* What every generated pass begins with: APART promises the compiler that a loop's turns are independent. */
#include <stdint.h>
#ifdef __clang__
#define APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define APART _Pragma("GCC ivdep")
#endif
