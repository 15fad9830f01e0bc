/* Names and texts of the statuses, and the one way to fill an xd_error. */
#include "xdev.h"

#include <stdarg.h>
#include <stdio.h>

const char *xd_status_name(int status)
{
    switch (status) {
#define NAME(name, value, text) \
    case value:                 \
        return #name;
        XD_STATUSES(NAME)
#undef NAME
    default:
        return "UNKNOWN";
    }
}

const char *xd_status_text(int status)
{
    switch (status) {
#define TEXT(name, value, text) \
    case value:                 \
        return text;
        XD_STATUSES(TEXT)
#undef TEXT
    default:
        return "unknown status";
    }
}

int xd_fail(xd_error *err, int status, int code, const char *operation, const char *format, ...)
{
    if (err) {
        va_list arguments;
        va_start(arguments, format);
        err->status = status;
        err->code = code;
        snprintf(err->operation, sizeof err->operation, "%s", operation);
        vsnprintf(err->text, sizeof err->text, format, arguments);
        va_end(arguments);
    }
    return status;
}
