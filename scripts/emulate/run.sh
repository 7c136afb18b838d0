#!/bin/sh
# Build the trials, put them on a CD with a Linux kernel and nothing else, and boot it in Bochs on a processor with
# AVX-512. Usage: run.sh FOLDER [TRIALS [SEED [FIRST [CORE]]]]. README.md says what it needs, and what BOCHS, SHARE, MODEL
# and ISA are for.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/cd" "$1/root"
out=$(cd "$1" && pwd)
trials=${2:-200} seed=${3:-1} first=${4:-0} core=${5:-}
limit=${LIMIT:-3600}
bochs=${BOCHS:-bochs} share=${SHARE:-/usr/share/bochs} model=${MODEL:-corei7_skylake_x} isa=${ISA:-avx512}

# A cloud kernel has what it needs to boot built in, and is small. It is unpacked, not installed.
kernel() {
  test -e "$out/cd/vmlinuz" && return
  package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: //p')
  rm -rf "$out/kernel" && mkdir "$out/kernel"
  (cd "$out/kernel" && apt-get download -q -o APT::Sandbox::User=root "$package" && dpkg -x "$package"_*.deb .)
  cp "$out"/kernel/boot/vmlinuz-* "$out/cd/vmlinuz"
}

# No xsavec, xsaves: Bochs 2.7 states their size wrongly, and Linux then turns off all vectors beyond SSE.
compact_disc() {
  cp "$out/build/trials" "$out/root/init"
  (cd "$out/root" && echo init | cpio -o -H newc --quiet) > "$out/cd/initrd.img"
  cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$out/cd/"
  cat > "$out/cd/isolinux.cfg" <<CONFIG
default trials
prompt 0
label trials
  kernel vmlinuz
  append initrd=initrd.img console=ttyS0,115200 quiet mitigations=off nosmp lpj=100000 tsc=reliable acpi=off pci=off noapic nolapic clearcpuid=321,323 -- $trials $seed $first $core
CONFIG
  xorriso -as mkisofs -quiet -o "$out/guest.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
    -boot-info-table "$out/cd" 2>"$out/xorriso.log"
}

# A slow clock: whatever waits for a time waits for few instructions.
machine() {
  cat > "$out/bochsrc" <<CONFIG
cpu: model=$model, count=1, ips=8000000, reset_on_triple_fault=0
memory: guest=512, host=512
romimage: file=$share/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
display_library: term
boot: cdrom
ata0-master: type=cdrom, path=$out/guest.iso, status=inserted
com1: enabled=1, mode=file, dev=$out/serial.txt
log: $out/bochs.log
panic: action=fatal
clock: sync=none
CONFIG
  echo continue > "$out/debugger"  # a Bochs that was built with one waits for it
}

cmake -S "$here" -B "$out/build" && cmake --build "$out/build" --target trials
kernel
compact_disc
machine
rm -f "$out/serial.txt"
# Bochs wants a terminal, and `script` is one; what it exits with says nothing, for the guest stops it.
status=0
TERM=vt100 timeout "$limit" script -qec "$bochs -q -f '$out/bochsrc' -rc '$out/debugger'" "$out/screen.txt" \
  </dev/null >/dev/null || status=$?
test $status -ne 124 || echo "stopped after $limit s"
grep -a 'FAILED\|^    \|trials\|not on\|library takes\|^exit' "$out/serial.txt" || true
grep -aq "^the library takes $isa[[:space:]]*\$" "$out/serial.txt" && grep -aq '^exit 0' "$out/serial.txt"
