tar --exclude='*.tmp' -czf docs.tar.gz docs
