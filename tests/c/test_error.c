/* Names and texts of every status, and the one way to fill an xd_error. */
#include "check.h"

int main(void)
{
    CHECK_TEXT(xd_status_name(XD_OK), "OK");
    CHECK_TEXT(xd_status_name(XD_NO_PEER), "NO_PEER");
    CHECK_TEXT(xd_status_text(XD_NO_PEER), "no peer access between the devices");
    CHECK_TEXT(xd_status_name(12345), "UNKNOWN");
    CHECK_TEXT(xd_status_text(12345), "unknown status");

    xd_error err;
    CHECK_EQ(xd_fail(&err, XD_READ, 5, "read", "%s at %d", "stopped", 7), XD_READ);
    CHECK_EQ(err.status, XD_READ);
    CHECK_EQ(err.code, 5);
    CHECK_TEXT(err.operation, "read");
    CHECK_TEXT(err.text, "stopped at 7");
    CHECK_EQ(xd_fail(NULL, XD_READ, 5, "read", "nobody listens"), XD_READ);

    char longest[1000];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    xd_fail(&err, XD_READ, 0, longest, "%s", longest);
    CHECK_EQ(strlen(err.operation), sizeof err.operation - 1);
    CHECK_EQ(strlen(err.text), sizeof err.text - 1);
    return 0;
}
