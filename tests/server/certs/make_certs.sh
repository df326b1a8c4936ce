#!/bin/sh
# Makes the certificates of the tests, valid for a hundred years: a root, two generations of a
# server's certificate, a client's, and those of a root that nobody trusts.
set -e
cd "$(dirname "$0")"
root() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 \
        -keyout "$1.key" -out "$1.pem" -subj "/CN=$1" -addext basicConstraints=critical,CA:TRUE
}
leaf() { # name, root, common name
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes \
        -keyout "$1.key" -out "$1.csr" -subj "/CN=$3"
    printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' > "$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days 36500 \
        -extfile "$1.ext" -out "$1.pem"
    rm "$1.csr" "$1.ext"
}
root root
root stranger
leaf server root "server 1"
leaf renewed root "server 2"
leaf client root client
leaf intruder stranger intruder
openssl ec -in server.key -aes128 -passout pass:secret -out encrypted.key
rm -f root.key stranger.key ./*.srl
