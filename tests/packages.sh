#!/bin/sh
# Debian packages that some tests need: several hosts, WireGuard between them, real images. Where they cannot be
# installed (not Debian, not root, no network) those tests are skipped and say so.
set -u
WANTED="iproute2 wireguard-tools wireguard-go dataset-fashion-mnist"
command -v dpkg-query >/dev/null || exit 0
missing=""
for package in $WANTED; do
  dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "tests that need$missing are skipped: apt-get install$missing"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null 2>&1
# shellcheck disable=SC2086
apt-get install -qq -y --no-install-recommends $missing >/dev/null 2>&1 || echo "could not install$missing: tests that need them are skipped"
